"""Check whether a run can be started in `run.folder`, and make all other checks of a run's settings.

The checks under config/ do not know which files a run leaves behind, so this check is here.

A run may replace and remove in a folder what a run has written there, and nothing else. So a run that opens its folder
leaves a marker in it. A folder that happens to have files of the same names, such as a repository with a `config.yaml`
and an `adapter/`, is no run's. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.schema import DEFAULT_CACHE_FOLDER, Config, DataConfig, DataFormat, RunConfig
from qlora_fsdp.config.settings import problem_about, show
from qlora_fsdp.records import run_state


def check_run(config: Config) -> list[Problem]:
    """Returns what is wrong with the configuration of a run and with its folder, whatever it runs on."""
    return [*check_run_folder(config.run), *_check_cache_folder(config.data), *check_settings(config)]


def _check_cache_folder(data: DataConfig) -> Iterator[Problem]:
    """Yields why tokenized rows can't be kept, for example where a container's HOME is nobody's."""
    if data.format is DataFormat.random:
        return
    try:
        folder = Path(data.cache_folder or DEFAULT_CACHE_FOLDER).expanduser()
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        may_be_made = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # told where it is opened
        return
    if nearest != folder and not may_be_made:  # one that is there may have all that is needed
        reason = f"can't be made: {nearest} is no folder that you may write to."
        fix = "Set data.cache_folder to one where there is room."
        yield problem_about("data.cache_folder", str(folder), reason, fix)


def check_run_folder(run: RunConfig) -> Iterator[Problem]:
    """Yields why the run folder can't be made or written, or why a run must not replace what is in it."""
    if not run.name.strip() or ".." in Path(run.name).parts:
        fix = "Set it to a word, and run.folder to the folder if that is to be elsewhere."
        yield problem_about("run.name", run.name, "is no name of a folder in outputs/.", fix)
        return
    if not run.folder:
        yield problem_about("run.folder", run.folder, "is empty.", "Set run.folder=FOLDER.")
        return
    folder = Path(run.folder).expanduser()
    # A folder is made together with its missing parents, so the nearest one that exists must allow it.
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # the name is too long for the file system
        yield problem_about("run.folder", run.folder, f"can't be made: {error.strerror}.", "Set a shorter run.name=.")
        return
    if not nearest.is_dir():
        fix = "Set run.folder to another folder."
        yield problem_about("run.folder", run.folder, f"can't be made: {nearest} is a file.", fix)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        fix = "Set run.folder to a folder that you may write to."
        yield problem_about("run.folder", run.folder, f"can't be written: no permission in {nearest}.", fix)
    elif obstacle := find_obstacle(folder):
        yield problem_about("run.folder", run.folder, *obstacle)
    elif not run.overwrite and run_state.is_finished(folder):
        fix = "Set another run.name= or run.folder=, or run.overwrite=true to replace it."
        state = run_state.read_run(folder)
        if state.adapter is not None:
            fix += f" To train its adapter further, set another run.name= and {show('lora.start', str(state.adapter))}."
        yield problem_about("run.folder", run.folder, f"already holds a finished run{_describe(state)}.", fix)


def _describe(state: run_state.RunState) -> str:
    """Describe what a finished run has left, as the end of a sentence."""
    parts = []
    if state.step is not None:
        parts.append(plural(state.step, "step"))
    if state.compared is not None:
        parts.append(f"{state.compared_by} {state.compared:.4f}")
    if state.adapter is not None:
        parts.append(f"its adapter in {state.adapter}")
    return f" ({', '.join(parts)})" if parts else ""


MARKER = ".qlora_fsdp"
MADE_BY = "qlora-fsdp"
# What a run writes under names of its own, which others may use as well. CHECKPOINTS is not among them, because every
# checkpoint is known by its own manifest.
OWN_NAMES = (
    "adapter",
    run_state.CONFIG_FILE,
    run_state.ENVIRONMENT_FILE,
    run_state.SUMMARY_FILE,
    run_state.WANDB_FILE,
    run_state.MLFLOW_FILE,
    run_state.STREAM_FILE,
    *run_state.RECORDS,
    run_state.ATTEMPT,
    run_state.LOCK,
)
OWN_CHECKPOINT = re.compile(rf"{run_state.CHECKPOINTS}/step-\d{{8,}}")  # the name that a run gives it
# What no link may be, because a run writes there, or its job.
FOLLOWED = (*OWN_NAMES, MARKER, run_state.CHECKPOINTS, run_state.CONSOLE_FILE, "wandb")


def is_marked(folder: Path) -> bool:
    """Whether a run has made this folder its own."""
    return run_state.read_json(folder / MARKER).get("made_by") == MADE_BY


def mark(folder: Path) -> None:
    """Makes a folder a run's, which it stays wherever it is moved.

    Raises:
        OSError: it can't be written.
    """
    if not is_marked(folder):
        about = "This folder is a run's. What the run has written in it may be replaced by run.overwrite=true."
        write_json(folder / MARKER, {"made_by": MADE_BY, "about": about})


def _find_unknown_checkpoints(folder: Path) -> list[str]:
    """The checkpoints of a run folder that are not whole or no run's, as paths in it."""
    found = run_state.checkpoint_folders(folder / run_state.CHECKPOINTS)
    return [f"{run_state.CHECKPOINTS}/{path.name}" for path in found if not is_checkpoint(path)]


def find_obstacle(folder: Path) -> tuple[str, str] | None:
    """Why a run must not use a folder, whatever its settings allow: as the end of a sentence, and what to do."""
    links = _find_links(folder)
    if links:
        fix = "Remove the link. For a run on another disk, set run.folder to a folder there, which may be a link."
        return f"holds the link {', '.join(links)}, and a run follows no links in its folder.", fix
    others = [] if is_marked(folder) else [name for name in OWN_NAMES if (folder / name).exists()]
    unknown = _find_unknown_checkpoints(folder)
    have_own_names = all(OWN_CHECKPOINT.fullmatch(name) for name in unknown)
    if unknown and have_own_names and not others:  # copied in part, perhaps
        fix = "Move this away: the same command then goes on from the checkpoint before, if there is one."
        return f"holds {', '.join(unknown)}, whose {run_state.MANIFEST} is missing or damaged.", fix
    others += unknown
    if others:
        fix = "Set another run.name= or run.folder=, or move these away. Only what a run has written is replaced."
        return f"holds {', '.join(others)}, of no run.", fix
    return None


def _find_links(folder: Path) -> list[str]:
    """The links in a run folder at places where a run writes."""
    links = [name for name in FOLLOWED if (folder / name).is_symlink()]
    if not links:  # checkpoints/ is a folder of its own
        steps = run_state.checkpoint_folders(folder / run_state.CHECKPOINTS)
        links = [f"{run_state.CHECKPOINTS}/{path.name}" for path in steps if path.is_symlink()]
    return links


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest such as a run writes, so that it is a checkpoint, be it a damaged one."""
    manifest = run_state.read_json(folder / run_state.MANIFEST)
    return not folder.is_symlink() and {"sha256", "step", "files"} <= manifest.keys()
