"""Check whether a run can be started in `run.folder`, and make all other checks of a run's settings.

The checks under config/ do not know which files a run leaves behind, so this check is here. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.check_settings import check_settings, check_world
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import problem_with, show
from qlora_fsdp.config.world import World
from qlora_fsdp.records.ownership import find_obstacle
from qlora_fsdp.records.run_state import RunState, is_finished, read_run


def check(config: Config, world: World) -> None:
    """Checks the configuration of a run against itself, the files that it names, its folder and the launch.

    Raises:
        ConfigError: something can't be used. Holds every problem found.
    """
    refuse([*check_run(config), *check_world(config, world)])


def check_run(config: Config) -> list[Problem]:
    """Returns what is wrong with the configuration of a run and with its folder, whatever it runs on."""
    return [*check_run_folder(config), *check_settings(config)]


def check_run_folder(config: Config) -> Iterator[Problem]:
    """Yields why the run folder can't be made or written, or why a run must not replace what is in it."""
    if not config.run.folder:
        yield problem_with(config, "run.folder", "is empty.", "Set run.folder=FOLDER.")
        return
    folder = Path(config.run.folder).expanduser()
    # A folder is made together with its missing parents, so the nearest one that exists must allow it.
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # the name is too long for the file system
        yield problem_with(config, "run.folder", f"can't be made: {error.strerror}.", "Set a shorter run.name=.")
        return
    if not nearest.is_dir():
        fix = "Set run.folder to another folder."
        yield problem_with(config, "run.folder", f"can't be made: {nearest} is a file.", fix)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        fix = "Set run.folder to a folder that you may write to."
        yield problem_with(config, "run.folder", f"can't be written: no permission in {nearest}.", fix)
    elif obstacle := find_obstacle(folder):
        yield problem_with(config, "run.folder", *obstacle)
    elif not config.run.overwrite and is_finished(folder):
        fix = "Set another run.name= or run.folder=, or run.overwrite=true to replace it."
        state = read_run(folder)
        if state.adapter is not None:
            fix += f" To train its adapter further, set another run.name= and {show('lora.start', str(state.adapter))}."
        yield problem_with(config, "run.folder", f"already holds a finished run{_describe(state)}.", fix)


def _describe(state: RunState) -> str:
    """Describe what a finished run has left, as the end of a sentence."""
    parts = [] if state.step is None else [plural(state.step, "step")]
    parts += [] if state.compared_loss is None else [f"{state.compared_by} {state.compared_loss:.4f}"]
    parts += [] if state.adapter is None else [f"its adapter in {state.adapter}"]
    return f" ({', '.join(parts)})" if parts else ""
