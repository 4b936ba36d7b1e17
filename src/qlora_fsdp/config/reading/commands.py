"""The command lines of the commands beside training: settings of their own, and any setting of training.

    qlora-fsdp generate adapter=DIR prompt="..." max_new_tokens=64 model.attn_implementation=eager

An adapter's folder holds the settings of model, quantization and task that it was trained with (`SETTINGS_FILE`).
These apply first, and what is typed wins over them. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.hub import loadable_name
from qlora_fsdp.config.adapter import foreign_settings
from qlora_fsdp.config.adapter.adapter_config import SETTINGS_FILE, adapter_problems
from qlora_fsdp.config.adapter.lora_start import correction_problems, order_problems
from qlora_fsdp.config.bounded_yaml import read_small_text
from qlora_fsdp.config.checks.check_settings import TRAINING, Needs, check_settings
from qlora_fsdp.config.reading.command_line import conf_folder
from qlora_fsdp.config.reading.compose import load_config, print_and_exit
from qlora_fsdp.config.reading.overrides import chosen_groups
from qlora_fsdp.config.recorded import is_hidden, sections_of
from qlora_fsdp.config.schema import Config, DataFormat, TaskName, Weights
from qlora_fsdp.config.settings import Sections, show, value_of

# Training on random or streamed data needs an end, which these commands do not.
WITHOUT_TRAINING: Sections = {"training": {"max_steps": 1}}
# What an adapter is evaluated on is named by who evaluates it.
WITHOUT_DATA: Sections = {"data": {"path": None}}


@dataclass
class CommandSettings:
    """The settings of every command that takes an adapter.

    Attributes:
        adapter: folder of an adapter; None for the base model alone.
    """

    adapter: str | None = None


@dataclass
class BaseAndAdapterSettings(CommandSettings):
    """The settings of every command that puts an adapter on its base.

    Attributes:
        other_base: do so with a base that has other weights than the adapter was trained on, in the same shapes.
    """

    other_base: bool = False


Settings = TypeVar("Settings", bound=CommandSettings)


def read_own_settings(argv: Sequence[str], kind: type[Settings], usage: str) -> Settings:
    """Reads the command line of a command that takes no settings of training.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type.
    """
    _show_help(argv, usage)
    values, rest, problems = _take_own(argv, kind)
    fix = f"Settings are {', '.join(f'{field.name}=...' for field in fields(kind))}."
    problems += [Problem(text, "is not a setting of this command.", fix) for text in rest]
    refuse(problems)
    return kind(**values)


def _show_help(argv: Sequence[str], usage: str) -> None:
    if "--help" in argv or "-h" in argv:
        print_and_exit(usage.strip())


def load_command(
    argv: Sequence[str], kind: type[Settings], usage: str, uses_default_data: bool = False, needs: Needs = TRAINING
) -> tuple[Settings, Config]:
    """Reads the command line of a command.

    Args:
        argv: settings of the command and of training, in any order.
        kind: a dataclass of the command's settings.
        usage: what --help prints.
        uses_default_data: whether the command takes the data that training takes where none is named.
        needs: the settings that the command uses. Beside a mistake, only what is wrong with these is told.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type, or the adapter's folder can't be used.
    """
    _show_help(argv, usage)
    values, rest, problems = _take_own(argv, kind)
    problems += sweep_problems(rest)
    settings = kind(**values)
    typed = chosen_groups(rest)
    if settings.adapter is not None:
        problems += adapter_problems(settings.adapter)
        if "experiment" in typed:
            reason = "can't be used with adapter=, whose saved settings are in its place."
            problems.append(Problem("experiment", reason, "Type the settings that are to be others."))
        problems += _of_training(rest)
    refuse(problems)
    beneath = [WITHOUT_TRAINING]
    if not uses_default_data:
        beneath.append(WITHOUT_DATA)
    wants_code = False
    saved: Sections = {}
    file = Path(settings.adapter or "").expanduser() / SETTINGS_FILE
    if settings.adapter is not None:
        if file.is_file():
            saved, wants_code = foreign_settings.read_foreign_settings(file)
            beneath.append(saved)
        elif "model" not in typed:
            beneath.append({"model": {"path": foreign_settings.read_base_model(file.parent)}})
    try:
        config = load_config(rest, partial(check_settings, needs=needs), beneath=beneath)
    except ConfigError as error:
        raise ConfigError([_with_file(problem, file, saved) for problem in error.problems]) from None
    refuse(list(order_problems(config.task, saved.get("task", {}).get("labels"), show("adapter", settings.adapter))))
    corrected = read_corrected_format(settings.adapter)
    named = show("adapter", settings.adapter)
    refuse(list(correction_problems(named, corrected, saved.get("quant", {}), config.quant)))
    wants_code = wants_code and not typed & {"model", foreign_settings.REMOTE_CODE}
    if wants_code and not config.model.trust_remote_code:
        raise ConfigError([foreign_settings.remote_code_problem(file, config.model.path or config.model.name)])
    return settings, config


def sweep_problems(argv: Sequence[str]) -> Iterator[Problem]:
    """Yields the problem of an option that would make a sweep, of a command that makes none."""
    for word in argv:
        if word in ("-m", "--multirun"):
            yield Problem(word, "makes sweeps of qlora-fsdp train alone.", "Leave it out, and set one value of each.")


def _of_training(argv: Sequence[str]) -> Iterator[Problem]:
    """Yields settings of the training that an adapter has behind it; `lora.start` says what that started from."""
    for text in argv:
        key = text.lstrip("+").partition("=")[0]
        if key.partition(".")[0] in ("lora", "optim") and key != "lora.start":
            yield Problem(text, "has no effect with adapter=, which has been trained already.", "Leave it out.")


def _with_file(problem: Problem, file: Path, saved: Sections) -> Problem:
    """Names the adapter's file before a value that stands in it. The problem shows the value that it is about.

    So where the user has typed another value, the problem shows that one, and stays as it is.
    """
    section, _, name = problem.setting.partition(".")
    if name not in saved.get(section, {}):
        return problem
    value = saved[section][name]
    is_stored = problem.what == show(problem.setting, value)
    return replace(problem, what=foreign_settings.quote_setting(file, problem.setting, value)) if is_stored else problem


def saved_settings(
    config: Config,
    class_weights: list[float] | None = None,
    trained_on: DataFormat | None = None,
    base_fingerprint: str | None = None,
    started_from: str | None = None,
    report_rows: str | None = None,
    corrected_format: str | None = None,
) -> str:
    """Returns the text of SETTINGS_FILE: what is needed to build an adapter's model again, and to use it.

    Args:
        config: the configuration of the run.
        class_weights: the weights of a classifier's labels, as numbers.
        trained_on: the form of the rows, by which prompts are written; None if it is unknown.
        base_fingerprint: fingerprint of the base's transformer layers; None for random weights.
        started_from: SHA-256 of the weights of `lora.start`; None for an adapter that began anew.
        report_rows: SHA-256 of the file of rows that the run has kept for the reports of merges; None without one.
        corrected_format: the format of the base whose rounding the adapter corrects; None for one that corrects none.
    """
    shown = {key: value_of(config, key) for key in foreign_settings.described() if not is_hidden(config, key)}
    values: dict[str, Any] = sections_of(shown)
    path = config.model.path
    if path is not None:
        values["model"]["path"] = loadable_name(path)
    if config.training.packing is not False:  # else it is a classifier, or the user's wish
        del values["training"]["packing"]
    if config.model.weights is not Weights.random:
        del values["training"]["seed"]
    if not values["training"]:
        del values["training"]
    if config.task.name is not TaskName.preference:
        del values["preference"]
    if config.data.system_prompt is None:
        del values["data"]["system_prompt"]
    if not config.data.template_arguments:
        del values["data"]["template_arguments"]
    if not values["data"]:
        del values["data"]
    if config.task.has_labels:
        values["task"]["class_weights"] = class_weights
    if trained_on is not None:
        values[foreign_settings.TRAINED_ON] = trained_on.value
    if base_fingerprint is not None:
        values[foreign_settings.BASE_FINGERPRINT] = base_fingerprint
    if started_from is not None and config.task.name is TaskName.preference:
        values[foreign_settings.STARTED_FROM] = started_from
    if report_rows is not None:
        values[foreign_settings.REPORT_ROWS] = report_rows
    if corrected_format is not None:
        values[foreign_settings.CORRECTED_FORMAT] = corrected_format
    return OmegaConf.to_yaml(OmegaConf.create(values))


def read_trained_on(adapter: str | None) -> DataFormat | None:
    """Returns the form of the rows that an adapter was trained on; None if its folder does not say."""
    note = _read_note(adapter, foreign_settings.TRAINED_ON)
    return next((form for form in DataFormat if form.value == note), None)


def read_started_from(adapter: str | None) -> str | None:
    """Returns the SHA-256 of the weights that an adapter's training started from; None if its folder names none."""
    return _read_note(adapter, foreign_settings.STARTED_FROM)


def read_base_fingerprint(adapter: str | None) -> str | None:
    """Returns the fingerprint of the base that an adapter was trained on; None if its folder names none."""
    return _read_note(adapter, foreign_settings.BASE_FINGERPRINT)


def read_report_digest(adapter: str | None) -> str | None:
    """Returns the SHA-256 of the rows that an adapter's run has kept for reports; None if its folder names none."""
    return _read_note(adapter, foreign_settings.REPORT_ROWS)


def read_corrected_format(adapter: str | None) -> str | None:
    """Returns the format of the base whose rounding an adapter corrects; None if its folder names none."""
    return _read_note(adapter, foreign_settings.CORRECTED_FORMAT)


def _read_note(adapter: str | None, name: str) -> str | None:
    """A note beside the settings in an adapter's folder, one word; None without one."""
    if adapter is None:
        return None
    try:
        text = read_small_text(Path(adapter).expanduser() / SETTINGS_FILE)  # a link, in the hub's cache
    except (OSError, ValueError):
        return None
    found = re.search(rf"^{name}: (\w+)$", text, re.MULTILINE)
    return None if found is None else found[1]


def _take_own(argv: Sequence[str], kind: type) -> tuple[dict[str, Any], list[str], list[Problem]]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    groups = {path.name for path in conf_folder().iterdir() if path.is_dir()}  # task=... is no misspelt tasks=...
    values: dict[str, Any] = {}
    rest, problems = [], []
    for text in argv:
        key, equals, value = text.partition("=")
        if key in names and equals:
            if key in values:
                problems.append(Problem(text, f"sets {key} for the second time.", "Leave one of them out."))
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                problems.append(Problem(text, f"must be {error}.", f"Set {key} to that, or leave it out."))
            continue
        may_be_misspelt = equals and key.isidentifier() and key not in groups
        near = difflib.get_close_matches(key, names, n=1)
        if may_be_misspelt and near:
            problems.append(Problem(text, "is not a setting.", f"Did you mean {near[0]}?"))
        else:
            rest.append(text)
    return values, rest, problems


def _convert(text: str, hint: Any) -> Any:
    if get_origin(hint) is UnionType:
        if text in ("null", "none"):
            return None
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("true or false")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    return text
