"""Do all ranks have the same settings? On several hosts each has a command line, an environment and files of its own.

Ranks with another learning rate would train their shards with it, without a word, and ranks with another model or
number of steps would wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import assert_never

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.config.schema import Hosts
from qlora_fsdp.config.settings import all_settings, show
from qlora_fsdp.runtime.processes import Processes

_FIX = "Type the same command on every host, with the same files of settings and variables."


def check_same_settings(recorded: Mapping[str, Any], processes: Processes) -> None:
    """Compares the settings of all ranks with those of rank 0. Every rank calls this.

    Args:
        recorded: this rank's settings by their keys, as the files of a run have them.
        processes: all ranks take part.

    Raises:
        ConfigError: some differ; the same on every rank. Holds every one of them.
    """
    first, *others = processes.gather(dict(recorded), dict[str, Any])
    problems: dict[str, Problem] = {}
    for rank, settings in enumerate(others, start=1):
        for key, value in settings.items():
            if key not in problems and _differs(key, value, first.get(key)):
                reason = f"on rank {rank} contradicts {show(key, first.get(key))} on rank 0."
                problems[key] = Problem(show(key, value), reason, _FIX, key)
    refuse(problems.values())


def _differs(key: str, value: Any, first: Any) -> bool:
    """Whether a value makes another run than rank 0's. A place may have another name, but is set on all or on none."""
    match all_settings()[key].facets.hosts:
        case Hosts.first:
            return False
        case Hosts.place:
            return bool(value) != bool(first)
        case Hosts.same:
            return bool(value != first)
        case unknown:
            assert_never(unknown)
