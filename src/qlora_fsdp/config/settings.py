"""The schema as a table with one `Setting` per field, for messages, for --help and for docs/configuration.md."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.text import is_number, is_unicode
from qlora_fsdp.config import schema
from qlora_fsdp.config.schema.former import FORMER, FORMER_VALUES

Sections = dict[str, dict[str, Any]]  # values by section and name


@dataclass(frozen=True)
class Setting:
    """One setting of the schema.

    Attributes:
        key: dotted, as typed on the command line, e.g. `lora.r`.
        type: the annotation without `None`, e.g. `int`, `dict[str, Any]` or an Enum.
        is_optional: whether `null` is a value.
        default: the default, before interpolation.
        comment: the comment above the field.
        facets: what else the field says of itself.
    """

    key: str
    type: Any
    is_optional: bool
    default: Any
    comment: str
    facets: schema.Facets

    @property
    def section(self) -> str:
        """The section that it is in, e.g. `lora`."""
        return self.key.partition(".")[0]

    @property
    def bounds(self) -> schema.Bounds | None:
        """The numbers that it takes, if these are bounded."""
        return self.facets.bounds

    @property
    def files(self) -> schema.Files:
        """The files that may set it."""
        return self.facets.files or schema.Files.users

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that an Enum setting may have; empty for any other setting."""
        return tuple(member.name for member in self.type) if isinstance(self.type, type(Enum)) else ()

    @property
    def words(self) -> tuple[str, ...]:
        """All values that it may have, as they are typed; empty where these are not a few."""
        if self.type is bool:
            return ("true", "false")
        return self.choices or tuple(map(_show_value, self.facets.values))

    @property
    def takes_list(self) -> bool:
        """Whether the value is a list of texts, or may be one."""
        return self.type == list[str] or self.facets.text_or_list

    @property
    def takes_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return get_origin(self.type) is dict

    @property
    def has_texts(self) -> bool:
        """Whether the value is text, or texts, so that what looks like a number is none."""
        return self.type in (str, dict[str, str]) or self.takes_list

    @property
    def expected(self) -> str:
        """A description of valid values, as the end of a sentence that starts with 'must be'."""
        if self.facets.text_or_list:
            text = "text or a list such as [a,b]"
        elif self.facets.values:
            *others, last = self.words
            text = f"{', '.join(others)} or {last}"
        elif self.facets.words:
            *others, last = ("a whole number", *map(_show_value, self.facets.words))
            text = f"{', '.join(others)} or {last}"
        elif self.choices:
            text = f"one of {', '.join(self.choices)}"
        else:
            text = _NOUNS[self.type]
        return f"{text} or null" if self.is_optional else text


_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list[str]: "a list such as [a,b]",
    list[int]: "a list of whole numbers such as [0,1]",
    list[float]: "a list of numbers such as [0.9,0.999]",
    dict[str, Any]: "a mapping {key: value}",
    dict[str, str]: "a mapping {name: name}",
    dict[str, int]: "a mapping {name: whole number}",
    dict[str, float]: "a mapping {name: number}",
    Any: "true, false, text or a list",
}

# What is meant by a word for on or off, of settings that take true and false besides others.
_TRUE_AND_FALSE = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0", "none", "never"), False),
}
# The same where a setting has names for its values: the first of these that it has.
_ON_AND_OFF = {
    **dict.fromkeys(("true", "yes", "on", "1"), ("online",)),
    **dict.fromkeys(("false", "no", "off", "0"), ("disabled", "none", "torch")),
}


@cache
def all_settings() -> dict[str, Setting]:
    """Returns every setting of the schema by its dotted key, in the schema's order."""
    return {setting.key: setting for setting in _walk(schema.Config, prefix="")}


@cache
def other_names() -> dict[str, str]:
    """Returns the settings by what other programs call them."""
    return {name: key for key, setting in all_settings().items() for name in setting.facets.other_names}


@cache
def keys_of(owner: schema.Owner) -> tuple[str, ...]:
    """Returns the settings that are the property of a base model or of an adapter."""
    return tuple(key for key, setting in all_settings().items() if setting.facets.owner is owner)


def is_passed_over(key: str, value: Any) -> bool:
    """Whether a value is the default of a setting that is no more, so that nobody has asked for anything."""
    return key in FORMER and value == FORMER[key].default


def example_of(key: str) -> str:
    """Returns `key=value` with a value that works, as a shell takes it; the key has an example."""
    return f"{key}={all_settings()[key].facets.example}"


def several_data_sets(key: str) -> str:
    """Returns what stands in the place of data.path where its value is meant to be several data sets; else nothing."""
    return f" For several data sets set {example_of('data.mix')} in its place." if key == "data.path" else ""


def nearest_settings(key: str) -> list[str]:
    """Returns the keys, nearest first, that a user who typed the unknown `key` may have meant; maybe none."""
    keys = list(all_settings())
    name = key.rpartition(".")[2]
    if name in other_names():
        return [other_names()[name]]
    # The right name in a wrong section, such as optim.learning_rate, is more common than a typo.
    elsewhere = [k for k in keys if k.rpartition(".")[2] == name]
    return (elsewhere or difflib.get_close_matches(key, keys, n=1, cutoff=0.75))[:2]


def value_of(config: schema.Config, key: str) -> Any:
    """Returns the value of the setting `key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def values_of(config: schema.Config) -> dict[str, Any]:
    """Returns the value of every setting, by its key."""
    return {key: value_of(config, key) for key in all_settings()}


def is_default(group: Any, key: str) -> bool:
    """Whether the setting `key` has the schema's default; `group` is the section that it is in."""
    return bool(_value_in(group, key) == all_settings()[key].default)


def problem_with(group: Any, key: str, reason: str, fix: str) -> Problem:
    """Returns the problem that the setting `key` has with its present value; `group` is the section that it is in."""
    return problem_about(key, _value_in(group, key), reason, fix)


def _value_in(group: Any, key: str) -> Any:
    return getattr(group, key.partition(".")[2])


def problem_about(key: str, value: Any, reason: str, fix: str) -> Problem:
    """Returns the problem that the setting `key` has with a value."""
    return Problem(show(key, value), reason, fix, setting=key)


def unknown_setting(key: str, value: Any) -> Problem:
    """Returns the problem with a key that is no setting, with the one that was probably meant."""
    if key in FORMER:
        return problem_about(key, value, "is no setting any more.", FORMER[key].instead)
    return problem_about(key, value, "is not a setting.", _explain_unknown(key))


def _explain_unknown(key: str) -> str:
    """The fix for a key that is no setting: the settings that may have been meant, or those of its section."""
    nearest = nearest_settings(key)
    if nearest:
        return f"Did you mean {' or '.join(nearest)}?"
    sections = [*(field.name for field in fields(schema.Config)), "experiment"]
    section = key.rpartition(".")[0] or key
    if section in sections:
        names = [name.removeprefix(f"{section}.") for name in all_settings() if name.startswith(f"{section}.")]
        return f"{section} has: {', '.join(names)}."
    near_sections = difflib.get_close_matches(key, sections, n=1, cutoff=0.7)
    if near_sections and "." not in key:
        return f"Did you mean {near_sections[0]}?"
    return "See --help for the commonest settings, docs/configuration.md for all."


def changed_by_reading(key: str, value: Any, written: Any) -> Problem | None:
    """Returns the problem with a value of which OmegaConf would make another one; None: there is none.

    It would make true of 7, and of YAML's `1.10` and `yes` the texts 1.1 and True. A whole number stays its digits,
    because labels are often numbers.

    Args:
        key: the setting.
        value: its value.
        written: the same, with every `${...}` as it was written: a text may be made of another setting's number.
    """
    setting = all_settings()[key]
    if setting.type is bool and is_number(value):
        return wrong_type(key, value)
    if not is_unicode(json.dumps(value, ensure_ascii=False, default=str)):
        return problem_about(key, value, "has bytes that are no UTF-8.", "Type it in UTF-8, or rename what it names.")
    if "${" in str(value):
        return problem_about(key, value, "has ${ in its text, which OmegaConf takes for a reference.", "Leave it out.")
    if not setting.has_texts:
        return None
    items = [written]
    if isinstance(written, dict):
        items = list(written.values())
    elif isinstance(written, list):
        items = written
    changed = [item for item in items if isinstance(item, (bool, float))]
    if not changed:
        return None
    kind = "true or false" if isinstance(changed[0], bool) else "a number"
    reason = f"must be {setting.expected}, and what is written there is read as {kind}."
    return problem_about(key, value, reason, "Put it in quotes.")


def wrong_type(key: str, value: Any) -> Problem:
    """Returns the problem with a value that the setting `key` can't have."""
    setting = all_settings()[key]
    best = _nearest_value(setting, value)
    fix = f"Set such a value, or leave {key} out." if best is None else f"Set {show(key, best)}."
    if best is not None and show(key, best) == show(key, value):  # a text that reads as true, say
        fix = "Leave out the quotes."
    if setting.facets.words and best == setting.default:
        fix = f"Set {show(key, best)}, the default."
    if setting.takes_mapping:
        fix = f"Set such a value, as in {example_of(key)}, or leave {key} out."
    return problem_about(key, value, f"must be {setting.expected}.", fix + several_data_sets(key))


def _nearest_value(setting: Setting, value: Any) -> Any:
    """A value that may have been meant: the nearest one that the setting takes, or else its default. None: no idea."""
    word = str(value).lower()
    former = FORMER_VALUES.get(setting.key, {})
    if word in former:
        return former[word]
    if setting.facets.values:
        shown = {_show_value(each): each for each in setting.facets.values}
        nearest = difflib.get_close_matches(word, shown, n=1)
        return _TRUE_AND_FALSE.get(word, shown[nearest[0]] if nearest else setting.default)
    if setting.facets.words and isinstance(value, str):
        nearest = difflib.get_close_matches(word, filter(None, setting.facets.words), n=1)
        return nearest[0] if nearest else setting.default
    by_lower = {choice.lower(): choice for choice in setting.choices}
    meant = [choice for choice in _ON_AND_OFF.get(word, ()) if choice in by_lower]
    longer = [choice for choice in by_lower if word.startswith(f"{choice}_")]  # as constant_with_warmup
    typos = difflib.get_close_matches(word, by_lower, n=1, cutoff=0.8)
    nearest = meant or typos or longer or difflib.get_close_matches(word, by_lower, n=1)
    if nearest:
        return by_lower[nearest[0]]
    if setting.type is bool and value in (0, 1):
        return bool(value)
    if setting.type is int and isinstance(value, float) and math.isfinite(value):
        lowest = -math.inf if setting.bounds is None else setting.bounds.low
        return int(max(round(value), lowest))
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", word)
    if setting.type is float and percent is not None:
        return float(percent[1]) / 100
    if setting.type == list[str] and isinstance(value, str) and value not in ("none", "null", "all", ""):
        return [value]
    return None if setting.type is str else setting.default


def show(key: str, value: Any) -> str:
    """Returns `key=value` as it is typed on the command line, e.g. `fsdp.cpu_offload=true`."""
    return f"{key}={_show_value(value)}"


def _show_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(map(_show_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_show_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def _walk(config_class: type, prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(config_class)
    comments = _comments(config_class)
    for field in fields(config_class):
        key = prefix + field.name
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, prefix=key + ".")
        else:
            yield _make_setting(key, hint, field, comments.get(field.name, ""))


def _make_setting(key: str, hint: Any, field: Field[Any], comment: str) -> Setting:
    """The setting that a field of the schema declares."""
    is_optional = get_origin(hint) in (Union, types.UnionType)
    if is_optional:
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    facets = field.metadata.get("facets")
    if facets is None:
        raise TypeError(f"{key} is declared without its facets: write {field.name}: ... = setting(...)")
    section = key.partition(".")[0]
    undecided = list(schema.find_undecided(section, hint, facets))
    if undecided:
        raise TypeError(f"{key} must say {', and '.join(undecided)}")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Setting(key, hint, is_optional or facets.text_or_list, default, comment, facets)


@cache
def _source(module: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The lines of a module of the schema, and its classes by name. `inspect` alone would parse it for each class."""
    source = inspect.getsource(sys.modules[module])
    return source.splitlines(), {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _comments(config_class: type) -> dict[str, str]:
    """The comment lines right above each field of a dataclass, joined."""
    comments = {}
    lines, classes = _source(config_class.__module__)
    for node in classes[config_class.__name__].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.append(line.strip().removeprefix("#").strip())
            comments[node.target.id] = " ".join(reversed(above))
    return comments
