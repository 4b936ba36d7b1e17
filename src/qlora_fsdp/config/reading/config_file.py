"""`--config my.yaml`: settings by their names, and options of groups, in one YAML file.

    model: llama3-8b
    data: chats.jsonl
    lora: {r: 8}
    training.max_steps: 100

A run's own config.yaml is such a file. Its values win over the options and the experiment that it picks, and what is
typed wins over both.

A folder of `--config-dir` is the user's own too, who names it, and its files may set and read whatever the user may.
But Hydra would also run what they name: callbacks, or any `_target_`. Nobody expects that of a file of settings that a
colleague passed on, so it is refused by name, but for what a sweeper has to be told. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.adapter.foreign_settings import find_forbidden, is_instruction, quote_setting, unplain_problems
from qlora_fsdp.config.bounded_yaml import parse_settings, read_small_text
from qlora_fsdp.config.reading.command_line import default_options, group_options
from qlora_fsdp.config.reading.overrides import is_path
from qlora_fsdp.config.schema import Owner
from qlora_fsdp.config.settings import Sections, all_settings, keys_of, show, unknown_setting

_SECTIONS = frozenset(key.partition(".")[0] for key in all_settings())


@dataclass(frozen=True)
class FileSettings:
    """The contents of a file of settings.

    Attributes:
        options: the options of groups that it picks, as on the command line: `quant=int8`.
        values: all else.
    """

    options: tuple[str, ...] = ()
    values: Sections = field(default_factory=dict)


def read_config_file(file: Path, folders: Sequence[Path]) -> FileSettings:
    """Reads the file of `--config`.

    Raises:
        ConfigError: the file can't be read, names what is no setting, or carries what no file may. Names every mistake.
    """
    try:
        found = parse_settings(read_small_text(file))
    except (OSError, ValueError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        problem = Problem(
            f"--config {file}", f"can't be read: {shorten(reason, 400)}.", "Name a YAML file with settings."
        )
        raise ConfigError([problem]) from None
    groups = {*default_options(), *group_options("", folders)}
    options: list[str] = []
    values: Sections = {}
    problems: list[Problem] = []
    for name, value in found.items():
        section, dot, setting = str(name).partition(".")
        if name in ("defaults", "hydra"):
            problems.append(_not_here(file, name, value))
        elif dot and section in _SECTIONS:
            values.setdefault(section, {})[setting] = value
        elif name in _SECTIONS and isinstance(value, dict):
            values.setdefault(section, {}).update({str(inner): item for inner, item in value.items()})
        elif is_path(str(name), value, folders):  # model: ORG/NAME, data: chats.jsonl
            problems += unplain_problems(file, section, value)
            values.setdefault(section, {})["path"] = value
            options.append(f"{name}={default_options()[section]}")
        elif name in groups and isinstance(value, (str, int, float)):
            problems += unplain_problems(file, section, value)
            options.append(f"{name}={value}")
        elif value is not None or (name not in _SECTIONS and name not in groups):
            problems.append(unknown_setting(str(name), value))
    problems += find_forbidden(values, file)
    refuse(problems)
    return FileSettings(tuple(options), values)


def _not_here(file: Path, name: str, value: Any) -> Problem:
    """What is said of the parts of a file for Hydra."""
    fix = "Type hydra.* on the command line."
    if name == "defaults":
        fix = (
            "Write `quant: int8` in place of `override /quant: int8`, or use the file as an experiment (--config-dir)."
        )
    return Problem(f"{file}: {shorten(show(name, value))}", "is no setting of a run.", fix)


def leave_out(values: Sections, groups: Collection[str], folders: Sequence[Path]) -> Sections:
    """Returns values of a file without what an option that is typed beside it decides.

    With `quant=int8`, nothing that the file says of quantization counts, and with `model=...` nothing that makes the
    model another one. With `optim=adamw_8bit` only its optim.name does not: no option of that group has anything else.
    """
    if not values:
        return {}
    decided = {key for group in groups for key in _decided_by(group, folders)}
    return {
        section: {name: value for name, value in names.items() if f"{section}.{name}" not in decided}
        for section, names in values.items()
    }


def _decided_by(group: str, folders: Sequence[Path]) -> Iterator[str]:
    """The settings that the choice of an option of a group decides, whichever that is."""
    if group == "model":
        yield from keys_of(Owner.base)
    if group in ("model", "experiment"):
        return
    if group in ("quant", "task"):
        yield from (key for key in all_settings() if key.startswith(f"{group}."))
    for folder in folders:
        for option in group_options(group, [folder]):
            yield from _set_by(folder / group / f"{option}.yaml", group)


def _set_by(file: Path, group: str) -> Iterator[str]:
    """The settings that the file of an option sets; none of one that can't be read, which Hydra tells if it is used."""
    if not file.is_file():  # nobody waits for a pipe
        return
    try:
        text = read_small_text(file)
        values = parse_settings(text)
    except (OSError, ValueError):
        return
    is_global = "@package _global_" in text.partition("\n")[0]
    sections = values if is_global else {group: values}
    for section, names in sections.items():
        if isinstance(names, dict):
            yield from (f"{section}.{name}" for name in names)


# What a file may tell a sweeper. What else Hydra takes, for example a database or code of one's own, is typed.
SWEEPER = ("params", "n_trials", "n_jobs", "direction", "study_name", "max_batch_size", "max_failure_rate", "sampler")

_HYDRAS_PACKAGE = re.compile(r"@package\s+(?:_global_\.)?hydra\b|@(?:_global_\.)?hydra\b")


def read_experiment(file: Path) -> dict[Any, Any]:
    """Reads a file for Hydra, once it is checked. Values are read as `--config`'s.

    Raises:
        ConfigError: it can't be read, stands for more than a file of settings has, or tells Hydra what to run.
    """
    try:
        text = read_small_text(file)
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
