"""What the files of a `--config-dir` folder may carry.

The folder is the user's own, who names it, and its files may set and read whatever the user may. But Hydra would also
run what they name: callbacks, or any `_target_`. Nobody expects that of a file of settings that a colleague passed on,
so it is refused by name, but for what a sweeper has to be told. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.bounded_yaml import parse_settings, read_text
from qlora_fsdp.config.foreign_settings import is_instruction, quote_setting

# What a file may tell a sweeper. What else Hydra takes, for example a database or code of one's own, is typed.
SWEEPER = ("params", "n_trials", "n_jobs", "direction", "study_name", "max_batch_size", "max_failure_rate", "sampler")

_HYDRAS_PACKAGE = re.compile(r"@package\s+(?:_global_\.)?hydra\b|@(?:_global_\.)?hydra\b")


def read_experiment(file: Path) -> dict[Any, Any]:
    """Reads a file for Hydra, once it is checked. Values are read as `--config`'s.

    Raises:
        ConfigError: it can't be read, stands for more than a file of settings has, or tells Hydra what to run.
    """
    try:
        text = read_text(file)
        values = parse_settings(text)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(file), f"can't be read: {shorten(str(error), 400)}.", "Correct it.")]) from None
    problems = [
        Problem(quote_setting(file, place, value), "tells Hydra what to run, and is no setting.", "Remove it.")
        for place, value in _find_instructions(values)
    ]
    fix = f"Type it on the command line; a file may have hydra.sweeper with {', '.join(SWEEPER)}."
    problems += [
        Problem(quote_setting(file, place, value), "is not for a file of settings.", fix)
        for place, value in _find_hydras(values)
    ]
    if _HYDRAS_PACKAGE.search(text):
        reason = "puts values among Hydra's own settings, which say what is run."
        problems.append(Problem(str(file), reason, "Remove @package hydra and @hydra from it."))
    refuse(problems)
    return values


def _find_instructions(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Keys such as `_target_`, and what they have."""
    if isinstance(value, list):
        for item in value:
            yield from _find_instructions(item, place)
    if isinstance(value, dict):
        for name, item in value.items():
            inner = f"{place}.{name}".lstrip(".")
            if is_instruction(str(name)):
                yield inner, item
            else:
                yield from _find_instructions(item, inner)


def _find_hydras(values: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """What a file says to Hydra beyond `SWEEPER`."""
    hydra = values.get("hydra")
    for name, value in hydra.items() if isinstance(hydra, dict) else ():
        if name != "sweeper" or not isinstance(value, dict):
            yield f"hydra.{name}", value
            continue
        yield from ((f"hydra.sweeper.{inner}", item) for inner, item in value.items() if inner not in SWEEPER)
