"""`-m` and `hydra/launcher=...`: Hydra's sweeper asks for jobs, and our launcher starts them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from qlora_fsdp.common.errors import Interrupted, LaunchError, Problem, RunFolderError, refuse
from qlora_fsdp.common.files import disk_reason
from qlora_fsdp.common.startup import is_rank
from qlora_fsdp.common.terminal import say
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.reading.command_line import Arguments
from qlora_fsdp.config.reading.compose import composing, read_given
from qlora_fsdp.config.reading.overrides import SweepOverrides, chosen_groups, read_overrides, read_sweep
from qlora_fsdp.config.settings import show
from qlora_fsdp.launch.sweep import ELSEWHERE, Typed, typed_for_all
from qlora_fsdp.records.run_state import read_run
from qlora_fsdp.report.page import write_report
from qlora_fsdp.report.run_files import next_commands, read_run_files
from qlora_fsdp.report.sweep_table import best_jobs, link_best, read_results, show_results, write_results

LAUNCHERS = tuple(f"hydra/launcher={name}" for name in ("accelerate", "slurm", "skypilot", "kubernetes"))
INSTALLED = ("hydra_plugins.", "hydra._internal.core_plugins.", "optuna.samplers.")  # what Hydra may call


def start_jobs(arguments: Arguments, environ: Mapping[str, str]) -> int:
    """Starts the jobs that the command line asks for, and prints their results.

    Returns:
        0 if every job has finished or has been submitted, else 1.

    Raises:
        ConfigError: settings of some job can't be used; none was started.
        LaunchError: this process is a rank itself.
        Interrupted: by a signal.
    """
    if is_rank(environ):
        raise LaunchError(
            "-m and hydra/launcher=... start jobs, and this process is already one of a job: accelerate launch or "
            "torchrun started it. Start it plainly: qlora-fsdp train -m ... launch.num_processes=2. It runs "
            "accelerate's launcher for every job (docs/sweeps.md)."
        )
    given = read_given(arguments)
    sweep = SweepOverrides(list(arguments.overrides))
    if arguments.multirun:
        sweep = read_sweep(arguments.overrides, arguments.folders)
    typed = read_overrides([*given.options, *sweep.of_all_jobs], arguments.folders)
    refuse([*typed.problems, *sweep.problems, *_wrong_launcher(arguments.overrides)])
    options = [word for folder in arguments.folders[1:] for word in ("--config-dir", str(folder))]
    if arguments.config_file is not None:
        options += ["--config", str(arguments.config_file)]
    picked = chosen_groups([*typed.options, *sweep.of_all_jobs])
    typed_for_all.set(Typed(tuple(options), tuple(sweep.of_all_jobs), frozenset(picked)))
    with composing(arguments.folders, OmegaConf.merge(given.values, typed.values)) as search_path:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        overrides = [*typed.options, *sweep.swept.values(), search_path]
        config = hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
        _refuse_code(config.hydra, arguments.overrides)
        folder = Path(config.hydra.sweep.dir).expanduser().resolve()
        is_elsewhere = config.hydra.launcher._target_.endswith(ELSEWHERE)
        submits = is_elsewhere or config.hydra.launcher._target_.endswith(".SlurmLauncher")
        refuse(_wrong_direction(config))
        if not is_elsewhere:
            refuse(_unwritable(folder))
        try:
            hydra.multirun("config", _never_called, overrides, with_log_configuration=False)
        except Interrupted:
            _show(folder)
            raise
    if config.launch.dry_run or is_elsewhere:
        return 0
    jobs = _show(folder)
    if submits:
        return 0
    statuses = [job["status"] for job in jobs] or [read_run(folder).status]
    return int(any(status != "finished" for status in statuses))


def _show(folder: Path) -> list[dict[str, Any]]:
    """Writes and prints the present state of the sweep's jobs."""
    jobs = read_results(folder)
    if jobs:
        say(f"\n{show_results(folder, jobs)}\n")
        try:
            write_results(folder, jobs)
        except OSError as error:
            say(f"These results can't be written to {folder}: {disk_reason(error)}.")
            return jobs
        link = None
        with suppress(OSError):  # the file system may have no links, or another command makes this one just now
            link = link_best(folder, jobs)
        files = "sweep.json, sweep.csv"
        with suppress(RunFolderError):  # no job may have a run folder yet
            write_report([folder])
            files += ", report.html"
        say(f"In {folder}: {files}")
        for job in best_jobs(jobs)[:1]:
            if link is not None:
                say(f"{link} is a link to {job['folder']}")
            commands = next_commands(read_run_files(Path(job["folder"]), "", job["overrides"]))
            say("\n".join(["Next, with the best:", *(f"  {command}" for command in commands)]))
    return jobs


def _never_called(config: object) -> None:
    """Stands for Hydra's task, in place of which our launchers run a command."""
    raise AssertionError


def _refuse_code(hydra: DictConfig, typed: Sequence[str]) -> None:
    """Refuses to let Hydra call anything but launchers and sweepers that are installed, unless the user types it.

    The files of --config-dir are checked one by one; this looks at what came of them together.
    """
    if any("_target_" in text or text.lstrip("+").startswith("hydra.callbacks") for text in typed):
        return
    called = [str(hydra.launcher._target_), *_find_called(OmegaConf.to_container(hydra.sweeper))]
    if hydra.callbacks:
        called.append("hydra.callbacks")
    problems = [
        Problem(target, "is no launcher or sweeper that is installed.", "Remove it from the files of --config-dir.")
        for target in called
        if not target.startswith(INSTALLED)
    ]
    refuse(problems)


def _find_called(value: Any) -> Iterator[str]:
    """What a section of Hydra's would have called."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in ("_target_", "custom_search_space") and item is not None:
                yield str(item)
            else:
                yield from _find_called(item)


def _unwritable(folder: Path) -> Iterator[Problem]:
    """Why a sweep's folder can't be written to, as Hydra does before the settings of any job are checked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return
    except OSError as error:
        fix = "Set run.name or run.folder to a folder that you may write to."
        yield Problem(shorten(show("run.folder", str(folder))), f"can't be written: {error.strerror}.", fix)


def _wrong_direction(config: DictConfig) -> Iterator[Problem]:
    """Why a sweeper that searches would take the worst runs for the best."""
    direction = config.hydra.sweeper.get("direction")
    if direction is None or OmegaConf.is_list(direction):
        return
    criterion = Criterion.of(config.training)
    wanted = "maximize" if criterion.greater_is_better else "minimize"
    found = getattr(direction, "name", direction)
    if found != wanted:
        key = "hydra.sweeper.direction"
        reason = f"is the wrong way: of training.metric_for_best_model={criterion.name}, {criterion.better} is better."
        yield Problem(show(key, found), reason, f"Set {key}={wanted}.")


def _wrong_launcher(overrides: Sequence[str]) -> list[Problem]:
    launchers = [text for text in overrides if text.startswith("hydra/launcher=")]
    fix = f"Set {' or '.join(LAUNCHERS)}."
    return [Problem(text, "can't start this.", fix) for text in launchers if text not in LAUNCHERS]
