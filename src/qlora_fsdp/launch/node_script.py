"""The shell script that a node of a cluster without SLURM runs, and what its writers have in common.

`qlora-fsdp train` starts the ranks of the node and passes SIGTERM on to them, on which they save and stop. Where there
are several nodes, a file of accelerate's says which of them this is. Imports no torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.config.reward_names import split_function
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.schema.facets import Hosts
from qlora_fsdp.config.settings import all_settings, problem_about, show, value_of
from qlora_fsdp.launch.sweep import Job, Sweep

MEETING_PORT = 29500
# Settings that name files too, though they are the same on all hosts of a run, as those of Hosts.place need not be.
ALSO_FILES = ("reward.functions", "reward.models", "distill.teacher_adapter")


@dataclass(frozen=True)
class NodeVariables:
    """Shell expressions for what a cluster tells each node.

    Attributes:
        rank: the node's number, from 0.
        main: name or address of node 0.
        gpus: GPUs of each node.
    """

    rank: str
    main: str
    gpus: str


def node_script(arguments: Sequence[str], setup: Sequence[str], num_nodes: int, variables: NodeVariables) -> str:
    """Returns the script of every node of a job.

    Args:
        arguments: of `qlora-fsdp train`.
        setup: shell commands to run first.
        num_nodes: nodes of the job.
        variables: what tells a node which one it is.
    """
    lines = [*setup, f"arguments=({shlex.join(arguments)})"]
    if num_nodes > 1:
        lines += [
            "nodes=$(mktemp)  # which node this is, for accelerate",
            'cat >"$nodes" <<END',
            "distributed_type: MULTI_GPU",
            f"num_machines: {num_nodes}",
            f"num_processes: $(({num_nodes} * {variables.gpus}))",
            f"machine_rank: {variables.rank}",
            f"main_process_ip: {variables.main}",
            f"main_process_port: {MEETING_PORT}",
            "same_network: true",
            "END",
            'arguments+=(launch.config_file="$nodes")',
        ]
    lines.append('exec qlora-fsdp train "${arguments[@]}"  # it passes SIGTERM on: the ranks save and stop')
    return "\n".join(lines) + "\n"


def job_names(jobs: Sequence[Job]) -> list[str]:
    """Returns a name for each job as clusters take them: at most 50 small letters, digits and dashes."""
    names = []
    for number, job in enumerate(jobs):
        text = re.sub(r"[^a-z0-9]+", "-", job.config.run.name.lower()).strip("-") or "run"
        ending = f"-{number}" if len(jobs) > 1 else ""
        names.append(f"qlora-{text[:40].strip('-')}{ending}")
    return names


def refuse_launch_settings(jobs: Sequence[Job], launcher: str, gpus: str) -> None:
    """Refuses jobs whose settings of the launcher differ, and settings of `launch` that have no effect in a cluster.

    Args:
        jobs: those of a sweep, or one.
        launcher: the name of its section, such as `kubernetes`.
        gpus: the setting that says how many GPUs a node has.

    Raises:
        ConfigError: naming all of them.
    """
    launch = jobs[0].config.launch
    settings = getattr(jobs[0].config, launcher)
    if any((getattr(job.config, launcher), job.config.launch) != (settings, launch) for job in jobs):
        reason = "differ between the jobs of a sweep."
        raise ConfigError([Problem(f"{launcher}.* and launch.*", reason, "Start a sweep for each value.")])
    problems = []
    for name in ("num_processes", "config_file"):
        value = getattr(launch, name)
        if value is not None:
            reason = f"has no effect with hydra/launcher={launcher}, where each GPU of a node gets a rank."
            problems.append(problem_about(f"launch.{name}", value, reason, f"Set {gpus}, or leave it out."))
    refuse(problems)


def folders_not_kept(jobs: Sequence[Job], mounts: Sequence[str], fix: str) -> Iterator[Problem]:
    """Yields the problem of run folders that would be gone with the node, and seen by no other one."""
    for job in jobs:
        if not any(is_below(str(job.folder), mount) for mount in mounts):
            reason = "is on no volume that outlives a node and that all nodes share."
            yield Problem(f"run.folder={job.folder}", reason, fix, "run.folder")
            return


def notes_on_files_left_here(jobs: Sequence[Job], mounts: Sequence[str], fix: str, workdir: str | None) -> list[str]:
    """Returns a line for each setting that names a file or folder of this host which no node of a job may see.

    It is no error: the image may have the same file.

    Args:
        jobs: those of a sweep, or one.
        mounts: folders where nodes see volumes that outlive them.
        fix: what to do about it, as the end of a sentence that begins with "unless the image has it,".
        workdir: the folder of this host of which each node gets a copy, and in which the run starts.
    """
    copied = None if workdir is None else Path(workdir).expanduser()
    notes: dict[str, None] = {}
    for job in jobs:
        for key, path in files_of_settings(job.config):
            is_copied = copied is not None and not Path(path).is_absolute() and (copied / path).exists()
            is_seen = is_copied or any(is_below(path, mount) for mount in mounts)
            if not is_seen:
                notes[f"Note: {show(key, path)} is on this host alone. Unless the image has it, {fix}"] = None
    return list(notes)


def files_of_settings(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each setting that names a file or folder of this host, with its path as it is written."""
    for key, setting in all_settings().items():
        if setting.facets.hosts is Hosts.place or key in ALSO_FILES:
            yield from ((key, path) for path in _paths_of(key, value_of(config, key)) if path_exists(path))


def _paths_of(key: str, value: Any) -> list[str]:
    """What a setting names, as paths: they may be none."""
    named = [value] if isinstance(value, str) else list(value or [])
    if key != "reward.functions":
        return named
    files = [split_function(name)[0] for name in named]
    return [file for file in files if file is not None]


def is_below(path: str, mount: str) -> bool:
    """Whether a path is in a folder where a volume is mounted."""
    return Path(path).is_relative_to(mount)


def as_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Returns a file with these documents. Texts of several lines stand as they are."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes texts of several lines as blocks, and no aliases, which few read well."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def sweep_that_waits(sweep: Sweep, place: str) -> Iterator[Problem]:
    """Yields the problem of a sweep whose next jobs depend on results, which are on a cluster's `place`."""
    if sweep.waits:
        reason = f"waits for results, which are on {place}."
        yield Problem("hydra/sweeper", reason, "Sweep over lists of values, or on this host.")
