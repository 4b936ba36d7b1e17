"""A sweep: the jobs that Hydra's sweeper asks for, started by one of our launchers, and the table of their results.

The folder of the sweep has a folder for every job, sweep.json, sweep.csv and report.html. A job's folder follows from
its settings, so that the same sweep, started again, continues with the jobs that have not finished.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from qlora_fsdp.common.disk import reason_of
from qlora_fsdp.common.errors import ConfigError, RunFolderError, refuse
from qlora_fsdp.common.terminal import say
from qlora_fsdp.config.hydra_files import FOLDER_SCHEME
from qlora_fsdp.launch.jobs import Job, collect_jobs
from qlora_fsdp.report.sweep_table import describe_job, write_results

Start = Callable[[list[Job], "Sweep"], None]


class Sweep:
    """Everything that all jobs of a sweep share.

    Args:
        config_loader: Hydra's loader, which composes the configuration of each job.
        config: the configuration of the sweep, with its section `hydra`.
        config_file: the file of `--config`, if there is one.
        picked: the groups of which that file picks an option.

    Attributes:
        folder: the absolute path of the sweep's folder.
        waits: whether the sweeper needs a job's result before it asks for the next job.
    """

    def __init__(
        self, config_loader: ConfigLoader, config: DictConfig, config_file: str | None, picked: Sequence[str]
    ) -> None:
        self.folder = Path(config.hydra.sweep.dir).expanduser().resolve()
        self.waits = not config.hydra.sweeper._target_.endswith(".BasicSweeper")
        self._compose = partial(config_loader.load_sweep_config, config)
        self._typed = list(config.hydra.overrides.task)
        folders = [path.removeprefix(FOLDER_SCHEME) for path in config.hydra.searchpath]
        self._options = [part for folder in folders for part in ("--config-dir", folder)]
        self._options += [] if config_file is None else ["--config", config_file]
        self._picked = frozenset(picked)
        self._jobs: dict[Path, Job] = {}

    def launch(self, batch: Sequence[Sequence[str]], start: Start) -> list[JobReturn]:
        """Starts a batch of jobs.

        Returns:
            For each job its last evaluation loss, or training loss where it evaluates on nothing, or infinity if it
            failed: a sweeper then continues with other jobs. So it does after a job whose settings can't be used, once
            others of a search have run.

        Raises:
            ConfigError: the settings of some job of the first batch can't be used, and none was started.
            RunFolderError: the folder of the sweep can't be written, and no job of the batch was started.
            Interrupted: by a signal, after which the running jobs have saved and ended.
        """
        jobs = collect_jobs(self._compose, batch, self._typed, self.folder, self._options, self._picked)
        refused = [job for job in jobs if job.problems]
        if not self._jobs:
            refuse(dict.fromkeys(problem for job in refused for problem in job.problems))  # most are the same for all
        for job in refused:
            print(f"{job.label} is not started: {ConfigError(job.problems)}", file=sys.stderr)
        self._jobs |= {job.folder: job for job in jobs}
        different = {job.folder: job for job in jobs}  # a sampler may ask for the same job twice
        unfinished = [job for job in different.values() if not job.is_done and not job.problems]
        has_table = any(job.swept for job in jobs) and not jobs[0].config.launch.dry_run
        if num_done := sum(job.is_done for job in different.values()):
            say(f"{num_done} of {len(different)} jobs have finished before.")
        if has_table:
            try:
                write_results(self.folder, self._describe())
            except OSError as error:
                fix = "Free space there, or set run.folder to a folder that you may write to."
                raise RunFolderError(f"run.folder={self.folder} can't be written: {reason_of(error)}. {fix}") from error
        try:
            start(unfinished, self)
        finally:
            if has_table:
                with suppress(OSError):  # told with the results, which are read in the jobs' own folders
                    write_results(self.folder, self._describe())
        return [_job_return(job) for job in jobs]

    def _describe(self) -> list[dict[str, Any]]:
        """The lines of sweep.json, in the order in which the sweeper asked for the jobs."""
        return [describe_job(job.folder, job.swept) for job in self._jobs.values()]


def _job_return(job: Job) -> JobReturn:
    state = job.state
    loss = state.compared_loss if state.status == "finished" and not job.problems else None
    value = loss if loss is not None and math.isfinite(loss) else math.inf
    return JobReturn(overrides=job.arguments, task_name=job.label, status=JobStatus.COMPLETED, _return_value=value)
