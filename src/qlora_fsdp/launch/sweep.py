"""A sweep: the jobs that Hydra's sweeper asks for, started by one of our launchers, and the table of their results.

The folder of the sweep has a folder for every job, sweep.json, sweep.csv and report.html. A job's folder follows from
its settings, so that the same sweep, started again, continues with the jobs that have not finished.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from qlora_fsdp.common.errors import ConfigError, Problem, RunFolderError, refuse
from qlora_fsdp.common.files import disk_reason
from qlora_fsdp.common.terminal import say
from qlora_fsdp.config.checks.check_settings import check_split
from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.reading.command_line import parse_arguments
from qlora_fsdp.config.reading.compose import read_arguments
from qlora_fsdp.config.reading.overrides import quote, show_typed, split_override
from qlora_fsdp.config.recorded import find_changes, plain_settings, read_settings
from qlora_fsdp.config.schema import Config, KubernetesConfig, Run, SkypilotConfig
from qlora_fsdp.config.settings import all_settings, problem_about, show
from qlora_fsdp.config.world import World
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.records.run_state import CONFIG_FILE, RunState, read_run
from qlora_fsdp.records.start_folder import find_start
from qlora_fsdp.report.sweep_table import describe_job, write_results

Start = Callable[[list["Job"], "Sweep"], None]
ELSEWHERE = (".SkypilotLauncher", ".KubernetesLauncher")  # launchers whose run folders are not seen from here
MAX_NAME = 120  # characters of a folder's name


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        swept: the settings in which it differs from the other jobs, with their values as typed.
        config: all of its settings.
        arguments: the arguments for `qlora_fsdp.train`.
        folder: the absolute path of its run folder.
        problems: why it can't run.
    """

    swept: dict[str, str]
    config: Config
    arguments: list[str]
    folder: Path
    problems: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        """The job's name in a message: `lora.r=8 training.learning_rate=0.0001`, or the run's if nothing is swept."""
        return " ".join(f"{key}={value}" for key, value in self.swept.items()) or self.config.run.name

    @property
    def state(self) -> RunState:
        """The state of the run in its folder now."""
        return read_run(self.folder)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do: the run has finished and should not be repeated."""
        return not self.config.run.overwrite and self.state.status == "finished"


@dataclass(frozen=True)
class Typed:
    """What is typed for all jobs of a sweep.

    Attributes:
        options: options of the command line, e.g. `--config-dir`.
        overrides: settings and options of groups, as they are typed.
        picked: the groups and settings of these, and the groups of which a file among the options picks an option.
    """

    options: tuple[str, ...]
    overrides: tuple[str, ...]
    picked: frozenset[str]


# Hydra makes the launcher, and a word that it is given would be read as Hydra's
typed_for_all: ContextVar[Typed] = ContextVar("typed_for_all")


def collect_jobs(batch: Sequence[Sequence[str]], typed: Typed, folder: Path) -> list[Job]:
    """Returns the jobs that a sweeper asks for, and says of each why it can't run.

    Args:
        batch: the overrides of each job, as the sweeper gives them.
        typed: what is typed for all jobs.
        folder: the folder of the sweep. Each job gets a folder in it, or the folder itself if nothing is swept.
    """
    jobs = []
    for texts in batch:
        overrides = OverridesParser.create().parse_overrides(list(texts))
        own = {_key(override): _as_typed(override) for override in overrides if _key(override) not in typed.picked}
        swept = {key: show_typed(key, text) for key, text in own.items()}
        job_folder = folder / job_name(swept) if swept else folder
        words = [*typed.overrides, *(f"{key}={text}" for key, text in own.items())]
        words.append(_write("run.folder", str(job_folder)))
        arguments = parse_arguments(["--multirun", *typed.options, *words])
        config, unusable, mistakes = read_arguments(arguments, find_start)
        of_run = [word for word in words if not _is_of_launch(word)]
        if swept and "run.name" not in swept:  # in W&B each job needs a name of its own
            of_run.append(_write("run.name", f"{config.run.name}__{job_folder.name}"))
        last = {split_override(word)[0]: word for word in of_run}
        job = Job(swept, config, [*typed.options, *last.values()], job_folder)
        problems = [*_swept_folder(swept), *unusable, *mistakes]
        jobs.append(replace(job, problems=tuple(problems or _check(job))))
    return jobs


def _swept_folder(swept: dict[str, str]) -> Iterator[Problem]:
    if "run.folder" in swept:
        fix = "Give one folder for the sweep; every job gets one of its own in it."
        yield Problem(f"run.folder={swept['run.folder']}", "is swept over.", fix)


def job_name(swept: dict[str, str]) -> str:
    """Returns the name of a job's folder, which depends on the job's own settings alone."""
    text = "__".join(f"{key}={value}" for key, value in swept.items())
    name = re.sub(r"[^\w.=+-]", "-", text, flags=re.ASCII)
    if name == text and len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _check(job: Job) -> list[Problem]:
    """Find why a job can't run. If its folder holds a run already, that must be the same run."""
    if job.is_done:
        return _harmful_changes(job)
    may_resume = job.config.checkpoint.resume == "auto" and not job.config.run.overwrite
    if may_resume and job.state.checkpoint:
        changes = _harmful_changes(job)
        if changes:
            return changes
    there = _mounts_elsewhere(job.config.skypilot, job.config.kubernetes)
    problems = [problem for problem in check_run(job.config) if not _is_only_there(problem, there)]
    if job.config.launch.num_processes is not None:
        num_ranks = job.config.launch.num_processes * job.config.slurm.nodes
        problems += check_split(job.config, World(num_ranks, local_num_ranks=job.config.launch.num_processes))
    return problems


def _mounts_elsewhere(skypilot: SkypilotConfig, kubernetes: KubernetesConfig) -> list[str]:
    """Folders that the nodes of a cluster see, and this host may not."""
    claimed = [] if kubernetes.claim is None else [kubernetes.mount_path]
    return [*skypilot.file_mounts, *claimed]


def _is_only_there(problem: Problem, mounts: Sequence[str]) -> bool:
    """Whether a problem is that this host does not see a path below one of the mounts."""
    is_about_place = any(text in problem.reason for text in ("does not exist", "can't be written", "is no "))
    return is_about_place and any(f"={mount.rstrip('/')}/" in problem.what for mount in mounts)


def _harmful_changes(job: Job) -> list[Problem]:
    """Problems with settings that make it another run than the one in its folder."""
    old = read_settings(job.folder / CONFIG_FILE)
    changes = find_changes(plain_settings(job.config), old) if old else {}
    problems = []
    for key, (value, was) in changes.items():
        if not all_settings()[key].facets.run.is_same and key not in job.config.checkpoint.allow_changes:
            has = "finished" if job.is_done else "a checkpoint"
            reason = f"was {show('', was)[1:]} in {job.folder}, which has {has}."
            fix = "Set another run.name, or run.overwrite=true to start anew."
            problems.append(problem_about(key, value, reason, fix))
    return problems


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _as_typed(override: Override) -> str:
    value: Any = override.value()
    return value if isinstance(value, str) else str(override.get_value_element_as_str())


def _write(key: str, text: str) -> str:
    is_plain = re.fullmatch(r"[\w./+:@=-]+", text, flags=re.ASCII)
    return f"{key}={text if is_plain else quote(text)}"


def _is_of_launch(word: str) -> bool:
    """Whether a setting, or an option of a group, says how jobs are started."""
    starting = {setting.section for setting in all_settings().values() if setting.facets.run is Run.start}
    key, _ = split_override(word)
    return key.partition(".")[0].partition("/")[0] in {*starting, "hydra"}


class Sweep:
    """Everything that all jobs of a sweep share.

    Args:
        config: the configuration of the sweep, with its section `hydra`.

    Attributes:
        folder: the absolute path of the sweep's folder.
        waits: whether the sweeper needs a job's result before it asks for the next job.
    """

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.hydra.sweep.dir).expanduser().resolve()
        self.waits = not config.hydra.sweeper._target_.endswith(".BasicSweeper")
        self._is_elsewhere = config.hydra.launcher._target_.endswith(ELSEWHERE)
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
        jobs = collect_jobs(batch, typed_for_all.get(), self.folder)
        refused = [job for job in jobs if job.problems]
        if not self._jobs:
            refuse(dict.fromkeys(problem for job in refused for problem in job.problems))  # most are the same for all
        for job in refused:
            print(f"{job.label} is not started: {ConfigError(job.problems)}", file=sys.stderr)
        self._jobs |= {job.folder: job for job in jobs}
        different = {job.folder: job for job in jobs}  # a sampler may ask for the same job twice
        unfinished = [job for job in different.values() if not job.is_done and not job.problems]
        is_seen = not (self._is_elsewhere or jobs[0].config.launch.dry_run)
        has_table = is_seen and any(job.swept for job in jobs)
        if num_done := sum(job.is_done for job in different.values()):
            say(f"{num_done} of {len(different)} jobs have finished before.")
        if has_table:
            try:
                write_results(self.folder, self._describe())
            except OSError as error:
                fix = "Free space there, or set run.folder to a folder that you may write to."
                raise RunFolderError(
                    f"run.folder={self.folder} can't be written: {disk_reason(error)}. {fix}"
                ) from error
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
    value = -math.inf if Criterion.of(job.config.training).greater_is_better else math.inf
    state = job.state
    if state.status == "finished" and not job.problems:
        figure = state.compared
        if figure is not None and math.isfinite(figure):
            value = figure
    return JobReturn(overrides=job.arguments, task_name=job.label, status=JobStatus.COMPLETED, _return_value=value)
