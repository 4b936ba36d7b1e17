"""Overrides as they are typed: `quant=int8`, `lora.r=8`. Imports no torch.

Hydra composes the options of groups, and gets what is typed for itself (`hydra.*`). The values of settings are read
here, mostly by Hydra's parser, and are merged into what it composes. What its grammar has no form for (`~` or `=` in a
path, quoted keys of a mapping) is taken as it is typed, or read as YAML. Of a sweep Hydra gets what has several values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.bounded_yaml import parse_yaml
from qlora_fsdp.config.reading.command_line import conf_folder, default_options, group_options
from qlora_fsdp.config.schema.former import FORMER
from qlora_fsdp.config.settings import (
    Setting,
    all_settings,
    example_of,
    nearest_settings,
    several_data_sets,
    show,
    unknown_setting,
    wrong_type,
)

MAX_LISTED = 20  # options of a group that a message names; of more, the nearest
# What people call an option of a group, where that is too different to be guessed. A second word is a setting.
OPTION_WORDS = {
    "quant": {"4bit": "nf4", "bnb-4bit": "nf4", "8bit": "int8", "bnb-8bit": "int8"},
    "task": {
        **dict.fromkeys(("sft", "clm", "lm", "causal", "instruct", "text_generation"), "causal_lm"),
        **{loss: f"preference preference.loss={loss}" for loss in ("dpo", "ipo", "simpo", "cpo", "orpo", "kto")},
        **dict.fromkeys(("rm", "reward_model", "reward_modeling"), "reward"),
        **dict.fromkeys(("ppo", "rl", "rlvr", "rloo"), "grpo"),
        **dict.fromkeys(("classification", "text_classification", "regression"), "sequence_classification"),
        "ner": "token_classification",
    },
}
_HYDRAS = ("hydra.", "hydra/")  # how its own settings and groups begin
_QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
_DECIMAL_COMMA = re.compile(r"\d+,\d+(?:[eE][-+]?\d+)?")
_VALUE = re.compile(rf"""({_QUOTED}|(?:\[[^\]]*\]|\{{[^}}]*\}}|[^,])*),""")  # of a sweep, with the comma behind it


@dataclass
class Overrides:
    """What is typed, in the parts in which it is used.

    Attributes:
        options: for Hydra: options of groups, and its own settings.
        values: the values of settings, by section and name.
        problems: one for each override that can't be used.
        replaced: values that are typed again further on, each with the one that counts.
    """

    options: list[str] = field(default_factory=list)
    values: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    problems: list[Problem] = field(default_factory=list)
    replaced: list[tuple[str, str]] = field(default_factory=list)


def read_overrides(texts: Sequence[str], folders: Sequence[Path]) -> Overrides:
    """Reads the overrides of one run. That a setting is unknown, or has a wrong type, is found when it is composed.

    Where a setting is typed twice, the last value counts, and of mappings all that they name.

    Args:
        texts: overrides as typed, e.g. `quant=int8`, `+lora.r=8`, `data.path=/a (1).jsonl`.
        folders: folders with groups of options; the first is the project's own.
    """
    found = Overrides()
    last = {split_override(text)[0]: text for text in _write_out(texts, folders)}
    for text in _write_out(texts, folders):
        problem = _find_problem(text, folders)
        if problem is not None:
            found.problems.append(problem)
            continue
        key, value = split_override(text)
        if _is_for_hydra(key, folders):
            found.options.append(_with_plus(text, folders))
            continue
        if text != last[key] and not value.startswith("{"):
            found.replaced.append((text, last[key]))
        try:
            OmegaConf.update(found.values, key, read_value(key, value), merge=True, force_add=True)
        except OmegaConfBaseException as error:
            fix = "Write ${section.name} for the value of another setting."
            found.problems.append(Problem(text, f"can't be read: {first_line(error)}.", fix))
        except ValueError as error:
            found.problems.append(_unreadable(text, key, error))
    return found


@dataclass
class SweepOverrides:
    """What is typed for a sweep.

    Attributes:
        of_all_jobs: what has one value, as it is typed.
        swept: what has several, by setting or group, in the form in which Hydra's sweepers read it.
        problems: one for each value that can't be used.
    """

    of_all_jobs: list[str] = field(default_factory=list)
    swept: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_sweep(texts: Sequence[str], folders: Sequence[Path]) -> SweepOverrides:
    """Divides the overrides of a sweep. Where a key is typed twice, the last one counts.

    A value that is listed comes back from Hydra's sweeper as it was typed. The job reads it, as if typed for it alone.
    """
    found = SweepOverrides()
    for text in _write_out(texts, folders, is_sweep=True):
        key, value = split_override(text)
        options = group_options(key, folders)
        parsed = _parse(text)
        swept = parsed.value() if parsed is not None and parsed.is_sweep_override() else None
        if isinstance(swept, Glob):  # Hydra itself does not look into --config-dir for these
            value = ",".join(swept.filter(options))
        is_function = isinstance(swept, Sweep) and not (isinstance(swept, ChoiceSweep) and swept.simple_form)
        values = _split_values(value)
        if key.startswith(_HYDRAS) or (len(values) == 1 and swept is None):
            found.swept.pop(key, None)
            found.of_all_jobs.append(text)
            continue
        # Of these two Hydra would make a sweep without jobs, without a word.
        if isinstance(swept, Glob) and not value:
            reason = f"matches no option of {key}, which has {', '.join(options) or 'none'}."
            fix = f"Set {key}=glob(*)." if options else f"List the values: {key}=a,b."
            found.problems.append(Problem(text, reason, fix))
        elif isinstance(swept, RangeSweep) and not list(swept.range()):
            fix = f"Write a stop beyond the start, as in {key}=range(0,5): the stop is not one of the values."
            found.problems.append(Problem(text, "has no value.", fix))
        elif not is_function:
            for each in values:
                found.problems += read_overrides([f"{key}={each}"], folders).problems
            value = ",".join(values if options else map(_as_word, values))
        found.of_all_jobs = [other for other in found.of_all_jobs if split_override(other)[0] != key]
        found.swept[key] = _with_plus(f"{key}={value}", folders)
    return found


def split_override(text: str) -> tuple[str, str]:
    """Returns the key and the value of an override, without the plus signs that Hydra has for new keys."""
    key, _, value = text.lstrip("+").partition("=")
    return key, value


def chosen_groups(texts: Sequence[str]) -> set[str]:
    """Returns the groups of which overrides pick an option, and the settings that they set: what is left of `=`."""
    return {split_override(text)[0] for text in texts}


def quote(text: str) -> str:
    """Returns text as the value of an override for Hydra, whatever characters it has."""
    return QuotedString(text, Quote.single).with_quotes()


def is_path(group: str, value: Any, folders: Sequence[Path]) -> bool:
    """Whether `model=value` or `data=value` means a path or a hub name and no option: `data=chats.jsonl`.

    A file of settings may have a list of paths there, which on the command line is text: `data=[a.jsonl,b.jsonl]`.
    """
    if group == "data" and isinstance(value, list):
        return True
    if group not in ("model", "data") or not isinstance(value, str) or value in group_options(group, folders):
        return False
    if group == "data" and Path(value).suffix:
        return True
    return "/" in value or value in (".", "..", "~") or path_exists(value)


def read_value(key: str, text: str) -> Any:
    """The value that is typed for a setting: a text setting's is what is typed, whatever it looks like.

    Raises:
        ValueError: it is a list or a mapping that can't be read; the message says why.
    """
    setting = all_settings().get(key)
    has_texts = setting is not None and setting.has_texts
    parsed = _parse(f"value={text}")
    if parsed is not None:
        value = parsed.value()
        if not has_texts or _are_texts(value):
            return value
    is_nested = text.startswith(("[", "{")) and not (setting is not None and setting.type is str)
    if not is_nested:
        return text
    items = text.removeprefix("[").removesuffix("]")
    is_plain_list = text == f"[{items}]" and not set("[]{}'\"") & set(items)
    if is_plain_list and has_texts:
        return [item.strip() for item in items.split(",")]
    if not has_texts:
        return parse_yaml(text)
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  # it makes texts of everything
    except yaml.YAMLError as error:
        raise ValueError(getattr(error, "problem", None) or first_line(error)) from None


def show_typed(key: str, text: str) -> str:
    """Returns the value that is typed for a setting as messages and files have it: 0.0001 for `1e-4`."""
    return show("", read_value(key, text))[1:]


def _are_texts(value: Any) -> bool:
    """Whether a value has texts alone. Hydra reads numbers in some."""
    if isinstance(value, list):
        return all(_are_texts(item) for item in value)
    if isinstance(value, dict):
        return all(_are_texts(item) for item in value.values())
    return value is None or isinstance(value, str)


def _as_word(value: str) -> str:
    """A value in the form in which Hydra hands it on as it is typed."""
    parsed = _parse(f"value={value}")
    is_word = re.fullmatch(r"[\w./-]+", value) is not None
    is_kept = is_word and parsed is not None and parsed.get_value_element_as_str() == value
    return value if is_kept else quote(value)


@cache
def _parser() -> OverridesParser:
    """Hydra's, to be used again: it takes longer to make one than to read most overrides."""
    return OverridesParser.create()


def _parse(text: str) -> Override | None:
    """An override as Hydra reads it; None: it can't."""
    with suppress(HydraException):
        return _parser().parse_overrides([text])[0]
    return None


def _split_values(text: str) -> list[str]:
    """The values of a sweep: what stands between commas that are within no quotes and no brackets."""
    return _VALUE.findall(f"{text},")


def _write_out(texts: Sequence[str], folders: Sequence[Path], is_sweep: bool = False) -> Iterator[str]:
    """The overrides that each stands for: `data=chats.jsonl` is `data=default` and `data.path=chats.jsonl`."""
    for text in texts:
        group, value = split_override(text)
        values = _split_values(value) if is_sweep else [value]
        if all(is_path(group, each.strip("'\""), folders) for each in values):
            yield f"{group}={default_options()[group]}"
            yield f"{group}.path={value}"
        else:
            yield text


def _is_for_hydra(key: str, folders: Sequence[Path]) -> bool:
    """Whether it is Hydra's own setting, or a group, or has Hydra's `@` for the package of one."""
    return key.startswith(_HYDRAS) or "@" in key or bool(group_options(key, folders))


def _with_plus(text: str, folders: Sequence[Path]) -> str:
    """An override in the form that Hydra needs: with plus signs for settings, and groups that its defaults lack."""
    key, value = split_override(text)
    if key.startswith(_HYDRAS):
        return text
    if "@" in key or group_options(key, folders[:1]):
        return f"{key}={value}"
    return f"+{key}={value}" if group_options(key, folders) else f"++{key}={value}"


def _find_problem(text: str, folders: Sequence[Path]) -> Problem | None:
    """What is wrong with an override, before its value is read."""
    key, value = split_override(text)
    if key.startswith("~"):
        return Problem(text, "removes a setting, which is not possible.", "Set it to another value.")
    if key in all_settings() and not value:
        or_out = ", or leave it out" if "=" in text else ""
        return Problem(text, "has no value.", f"Write {key}=VALUE{or_out}.", setting=key)
    if "=" not in text:
        is_file = key.endswith((".yaml", ".yml"))
        fix = f"Did you mean --config {text}?" if is_file else _explain_word(text)
        return Problem(text, "is not of the form key=value.", fix)
    if key in FORMER:
        return unknown_setting(key, value)
    is_text = key in all_settings() and all_settings()[key].has_texts
    if value.startswith("=") and not is_text:
        return Problem(text, "has two equals signs.", f"Write {key}{value}.")
    if key.startswith("hydra/") and value == "null":  # Hydra would end with a traceback
        return Problem(text, "names no option.", f"Leave {key} out.")
    if key.startswith(_HYDRAS):
        return None
    parsed = _parse(text)
    options = group_options(key, folders)
    if parsed is not None and parsed.is_sweep_override():
        return _several_values(text, key, is_group=bool(options))
    option = value.strip("'\"")
    if options and option not in options:
        return _unknown_option(key, option, options)
    if parsed is not None and _is_of_other_kind(key, parsed.value()):
        return wrong_type(key, parsed.value())
    return None


def _is_of_other_kind(key: str, value: Any) -> bool:
    """Whether a list is given for a mapping, or a mapping for a list: OmegaConf can't merge these, and stops."""
    kind = get_origin(all_settings()[key].type) if key in all_settings() else None
    return (kind is dict and isinstance(value, list)) or (kind is list and isinstance(value, dict))


def _several_values(text: str, key: str, is_group: bool) -> Problem:
    """The problem with several values for one run, which are a sweep's, or a list without its brackets."""
    _, value = split_override(text)
    setting = all_settings().get(key)
    may_be_list = setting is None and not is_group
    may_be_text = may_be_list
    if setting is not None:
        takes_anything = setting.type is Any and not setting.words
        may_be_list = takes_anything or get_origin(setting.type) is list
        may_be_text = takes_anything or setting.type is str
    fix = "For a sweep add -m"
    if setting is not None and setting.type is float and _DECIMAL_COMMA.fullmatch(value):
        fix += f", for a number with a fraction write {key}={value.replace(',', '.')}"
    if may_be_list:
        fix += f", for a list write {key}=[{value}]"
    if may_be_text:
        fix += f", for a text with a comma {key}='\"{value}\"'"
    return Problem(text, "gives several values to one run.", f"{fix}.{several_data_sets(key)}")


def _unreadable(text: str, key: str, error: ValueError) -> Problem:
    """The problem with a list or a mapping that is in no form."""
    setting: Setting | None = all_settings().get(key)
    fix = f"Write {key}=[a,b] for a list, and {key}=a,b for a sweep."
    if setting is not None and setting.takes_mapping:
        fix = f"Write it as {example_of(key)}."
    reason = str(error).removeprefix("line 1: ")
    return Problem(text, f"can't be read: {reason}.", fix)


def _explain_word(word: str) -> str:
    """The fix for a word without an equals sign, which may be an option of a group or the name of a setting."""
    folders = [conf_folder()]
    groups = [group for group in group_options("", folders) if word in group_options(group, folders)]
    meant = [f"{group}={word}" for group in groups]
    if not groups and is_path("data", word, folders):
        meant = [f"data={word}"]
    elif not groups:
        meant = [f"{key}=VALUE" for key in nearest_settings(word)]
    return f"Did you mean {' or '.join(meant[:2])}?" if meant else "See --help for examples."


def _unknown_option(group: str, option: str, options: Sequence[str]) -> Problem:
    """The problem with an option that a group does not have."""
    near = difflib.get_close_matches(option.lower(), options, n=6, cutoff=0.4)
    if len(options) <= MAX_LISTED:
        listed = f"it has {', '.join(options)}"
    elif near:
        listed = f"it has {', '.join(near)} and others (docs/configuration.md)"
    else:
        listed = "docs/configuration.md lists them"
    nearest = _nearest_options(group, option.lower(), options)
    if nearest:
        fix = f"Did you mean {' or '.join(f'{group}={name}' for name in nearest)}?"
    elif option == "null" and default_options().get(group, "") is None:
        fix = f"Leave {group} out for none."
    else:
        fix = f"Set {group} to one of these."
    if group in ("model", "data") and option != "null":
        fix += f" For a path or a hub name set {group}.path={option}."
    return Problem(show(group, option), f"is no option of {group}: {listed}.", fix)


def _nearest_options(group: str, typed: str, options: Sequence[str]) -> list[str]:
    """The options that may have been meant, in small letters."""
    meant = OPTION_WORDS.get(group, {}).get(typed)
    if meant is not None:
        return [meant]
    longer = [name for name in options if name.startswith(f"{typed}-")]  # such as -base and -instruct of a model
    longer.sort(key=_size_in_name)  # most can train the smallest ones
    return longer[:2] or difflib.get_close_matches(typed, options, n=1, cutoff=0.5)


def _size_in_name(name: str) -> float:
    """The billions of parameters that an option's name tells, as in llama3-8b; infinite if it tells none."""
    found = re.search(r"(?:^|-)(\d+(?:\.\d+)?)b(?:-|$)", name)
    return float(found[1]) if found else math.inf
