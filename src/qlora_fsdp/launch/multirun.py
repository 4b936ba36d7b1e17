"""`-m` and `hydra/launcher=...`: Hydra's sweeper asks for jobs, and our launcher starts them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from qlora_fsdp.common.errors import ConfigError, Interrupted, LaunchError, Problem, RunFolderError
from qlora_fsdp.config.command_line import Arguments
from qlora_fsdp.config.compose import composing
from qlora_fsdp.config.overrides import prepare_overrides
from qlora_fsdp.records.run_state import read_run
from qlora_fsdp.report.page import write_report
from qlora_fsdp.report.sweep_table import read_results, show_results, write_results

LAUNCHERS = ("accelerate", "slurm")


def start_jobs(arguments: Arguments, environ: Mapping[str, str]) -> int:
    """Starts the jobs that the command line asks for, and prints their results.

    Returns:
        0 if every job has finished or has been submitted, else 1.

    Raises:
        ConfigError: settings of some job can't be used; none was started.
        LaunchError: this process is a rank itself.
        Interrupted: by a signal.
    """
    _refuse_ranks(environ)
    overrides, problems = prepare_overrides(arguments.overrides, arguments.folders, sweep=arguments.multirun)
    problems += _wrong_launcher(arguments)
    if problems:
        raise ConfigError(problems)
    with composing(arguments.folders) as search_path:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        overrides = [*overrides, search_path]
        config = hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
        folder = Path(config.hydra.sweep.dir).expanduser().resolve()
        submits = config.hydra.launcher._target_.endswith(".SlurmLauncher")
        try:
            hydra.multirun("config", _never_called, overrides, with_log_configuration=False)
        except Interrupted:
            _show(folder)
            raise
    if config.launch.dry_run:
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
        write_results(folder, jobs)
        files = "sweep.json, sweep.csv"
        with suppress(RunFolderError):  # no job may have a run folder yet
            write_report([folder])
            files += ", report.html"
        print(f"\n{show_results(folder, jobs)}\n\nIn {folder}: {files}", flush=True)
    return jobs


def _never_called(config: object) -> None:
    """Stands for Hydra's task, in place of which our launchers run a command."""
    raise AssertionError


def _refuse_ranks(environ: Mapping[str, str]) -> None:
    if "RANK" in environ or "ACCELERATE_MIXED_PRECISION" in environ:
        raise LaunchError(
            "-m and hydra/launcher=... start jobs, and this process is already one of a job: accelerate launch or "
            "torchrun started it. Start it plainly: qlora-fsdp train -m ... launch.num_processes=2. It runs "
            "accelerate's launcher for every job (docs/sweeps.md)."
        )


def _wrong_launcher(arguments: Arguments) -> list[Problem]:
    problems = []
    for text in arguments.overrides:
        key, _, value = text.partition("=")
        if key == "hydra/launcher" and value not in LAUNCHERS:
            problems.append(
                Problem(text, "can't start this.", "Set hydra/launcher=accelerate or hydra/launcher=slurm.")
            )
    return problems
