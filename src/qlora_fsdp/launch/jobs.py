"""The jobs of a sweep: their names, folders and settings, and whether these can be used. Imports no torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.config.check_settings import check_split
from qlora_fsdp.config.compose import read_composed
from qlora_fsdp.config.identity import NOT_THE_RUNS, find_changes, is_harmless, plain_settings, read_settings
from qlora_fsdp.config.overrides import quote
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import problem_about, show
from qlora_fsdp.config.world import World
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.records.run_state import CONFIG_FILE, RunState, read_run
from qlora_fsdp.records.start_folder import find_start

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


def collect_jobs(
    compose: Callable[[list[str]], DictConfig],
    batch: Sequence[Sequence[str]],
    typed: Sequence[str],
    folder: Path,
    options: Sequence[str],
    picked: Collection[str],
) -> list[Job]:
    """Returns the jobs that a sweeper asks for, and says of each why it can't run.

    Args:
        compose: makes a configuration of overrides.
        batch: the overrides of each job, as the sweeper gives them.
        typed: the overrides of the command line, which may have several values.
        folder: the folder of the sweep. Each job gets a folder in it, or the folder itself if nothing is swept.
        options: options for every job's command line, e.g. `--config-dir`.
        picked: the groups of which a file among the options picks an option, so that nobody need type it.
    """
    parser = OverridesParser.create()
    last = {_key(override): override for override in parser.parse_overrides(list(typed))}  # of a setting typed twice
    fixed = {key for key, override in last.items() if not override.is_sweep_override()}
    jobs = []
    for texts in batch:
        overrides = parser.parse_overrides(list(texts))
        swept = {_key(o): _value(o) for o in overrides if _key(o) not in fixed}
        own = folder / job_name(swept) if swept else folder
        arguments = [
            f"{_key(override)}={override.get_value_element_as_str()}"
            for override in overrides
            if not _is_of_launch(_key(override)) and _key(override) not in ("run.folder", *picked)
        ]
        config, mistakes = read_composed(partial(_compose_job, compose, texts, own), find_start)
        if swept and "run.name" not in swept:  # in W&B each job needs a name of its own
            arguments = [text for text in arguments if not text.startswith("run.name=")]
            arguments.append(_as_typed("run.name", f"{config.run.name}__{own.name}"))
        job = Job(swept, config, [*options, *arguments, _as_typed("run.folder", str(own))], own)
        problems = [*_swept_folder(swept), *(mistakes or _check(job))]
        jobs.append(replace(job, problems=tuple(problems)))
    return jobs


def _swept_folder(swept: dict[str, str]) -> Iterator[Problem]:
    if "run.folder" in swept:
        fix = "Give one folder for the sweep; every job gets one of its own in it."
        yield Problem(f"run.folder={swept['run.folder']}", "is swept over.", fix)


def _compose_job(compose: Callable[[list[str]], DictConfig], texts: Sequence[str], folder: Path) -> DictConfig:
    """The plain values of a job's settings."""
    composed = compose([*texts, f"++run.folder={quote(str(folder))}"])
    with open_dict(composed):
        del composed["hydra"]
    return composed


def job_name(swept: dict[str, str]) -> str:
    """Returns the name of a job's folder, which depends on the job's own settings alone."""
    text = "__".join(f"{key}={value}" for key, value in swept.items())
    name = re.sub(r"[^\w.=+-]", "-", text, flags=re.ASCII)
    if name == text and len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _check(job: Job) -> list[Problem]:
    """Find why a job can't run. If its folder holds a run already, that must be the same run."""
    may_resume = job.config.checkpoint.resume == "auto" and not job.config.run.overwrite
    if job.is_done or (may_resume and job.state.checkpoint):
        changes = _harmful_changes(job)
        if changes or job.is_done:
            return changes
    problems = check_run(job.config)
    if job.config.launch.num_processes is not None:
        num_ranks = job.config.launch.num_processes * job.config.slurm.nodes
        problems += check_split(job.config, World(num_ranks, local_num_ranks=job.config.launch.num_processes))
    return problems


def _harmful_changes(job: Job) -> list[Problem]:
    """Problems with settings that make it another run than the one in its folder."""
    old = read_settings(job.folder / CONFIG_FILE)
    changes = find_changes(plain_settings(job.config), old) if old else {}
    problems = []
    for key, (value, was) in changes.items():
        if not is_harmless(key) and key not in job.config.checkpoint.allow_changes:
            has = "finished" if job.is_done else "a checkpoint"
            reason = f"was {show('', was)[1:]} in {job.folder}, which has {has}."
            fix = "Set another run.name, or run.overwrite=true to start anew."
            problems.append(problem_about(key, value, reason, fix))
    return problems


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _value(override: Override) -> str:
    value: Any = override.value()
    return value if isinstance(value, str) else str(override.get_value_element_as_str())


def _as_typed(key: str, text: str) -> str:
    is_plain = re.fullmatch(r"[\w./+:@=-]+", text, flags=re.ASCII)
    return f"{key}={text if is_plain else quote(text)}"


def _is_of_launch(key: str) -> bool:
    return key.partition(".")[0].partition("/")[0] in (*NOT_THE_RUNS, "hydra")
