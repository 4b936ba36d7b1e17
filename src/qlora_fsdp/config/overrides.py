"""Overrides as they are typed, in the form that Hydra needs, and the mistakes in them. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.config.command_line import conf_folder, default_options, group_options
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
# What people call an option of a group, where that is too different to be guessed.
OPTION_WORDS = {"quant": {"4bit": "nf4", "int4": "nf4", "bnb-4bit": "nf4", "8bit": "int8", "bnb-8bit": "int8"}}
SPECIAL = r"([\\()\[\]{}:=, ])"  # characters of keys that Hydra reads only after a backslash
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""")
VALUE = re.compile(rf"""({QUOTED.pattern}|(?:\[[^\]]*\]|\{{[^}}]*\}}|[^,])*),""")  # of a sweep
WORD = re.compile(r"((?:^|[\[,:{])\s*)([\w.+-]+)(?=\s*(?:[,\]}]|$))")  # an item that may look like a number
CLOSING = {"[": "]", "{": "}", "(": ")"}


def prepare_overrides(
    texts: Sequence[str], folders: Sequence[Path], sweep: bool = False
) -> tuple[list[str], list[Problem]]:
    """Checks the form of overrides and the options of groups, and gives the overrides the form that Hydra needs.

    Args:
        texts: overrides as typed, e.g. `quant=int8`, `+lora.r=8`, `data.path=/a (1).jsonl`.
        folders: folders with groups of options; the first is the project's own.
        sweep: whether an override may have several values, e.g. `lora.r=8,16`.

    Returns:
        The usable overrides for Hydra, and a problem for each of the others.
    """
    usable = list[str]()
    problems = list[Problem]()
    for typed in texts:
        for text in _written_out(typed, folders, sweep):
            override = _parse(text, sweep)
            if isinstance(override, Problem):
                problems.append(override)
                continue
            found = list(_find_problems(text, override, folders, sweep))
            problems += found
            if not found:
                usable.append(_for_hydra(text, override, folders))
    return usable, problems


def _find_problems(text: str, override: Override, folders: Sequence[Path], sweep: bool) -> Iterator[Problem]:
    """Yields what is wrong with an override that Hydra can read. The check against the schema comes later."""
    key = override.key_or_group
    value = override.value()
    options = group_options(key, folders)
    if key in FORMER:
        yield unknown_setting(key, text.partition("=")[2])
    elif _is_hydras(key):
        if key.startswith("hydra/") and value is None:  # Hydra would end with a traceback
            yield Problem(text, "names no option.", f"Leave {key} out.")
    elif override.is_delete():
        yield Problem(text, "removes a setting, which is not possible.", "Set it to another value.")
    elif override.is_sweep_override() and not sweep:
        yield _several_values(text, key, is_group=bool(options))
    elif isinstance(value, Glob):
        if not value.filter(options):
            reason = f"matches no option of {key}, which has {', '.join(options) or 'none'}."
            yield Problem(text, reason, f"Set {key}=glob(*)." if options else f"List the values: {key}=a,b.")
    else:
        for each in list(override.sweep_iterator()) if override.is_discrete_sweep() else [value]:
            if options and each not in options:
                yield _unknown_option(key, each, options)
            elif not options and _is_of_other_kind(key, each):
                yield wrong_type(key, each)  # Hydra stops at the first


def _for_hydra(text: str, override: Override, folders: Sequence[Path]) -> str:
    """An override in the form that Hydra needs, which wants a plus sign for what its defaults do not name."""
    key = override.key_or_group
    if _is_hydras(key):
        return text
    options = group_options(key, folders)
    value = override.value()
    if isinstance(value, Glob):  # Hydra itself does not look into --config-dir for these
        text = f"{key}={','.join(value.filter(options))}"
    elif override.input_line is not None:
        text = override.input_line
    text = text.lstrip("+")
    if group_options(key, folders[:1]):
        return text
    return f"+{text}" if options else f"++{text}"


def _is_hydras(key: str) -> bool:
    return key.startswith(("hydra.", "hydra/"))


def _several_values(text: str, key: str, is_group: bool) -> Problem:
    """The problem with several values for one run, which are a sweep's, or a list without its brackets."""
    value = text.partition("=")[2]
    setting = all_settings().get(key)
    is_any = not is_group if setting is None else setting.type is Any and not setting.words
    fix = "For a sweep add -m"
    if is_any or (setting is not None and get_origin(setting.type) is list):
        fix += f", for a list write {key}=[{value}]"
    if is_any or (setting is not None and setting.type is str):
        fix += f", for a text with a comma {key}='\"{value}\"'"
    return Problem(text, "gives several values to one run.", f"{fix}.{several_data_sets(key)}")


def chosen_groups(texts: Sequence[str]) -> set[str]:
    """Returns the groups of which overrides pick an option, and the settings that they set: what is left of `=`."""
    return {text.lstrip("+").partition("=")[0] for text in texts}


def quote(text: str) -> str:
    """Returns text as the value of an override, whatever characters it has."""
    return f"'{escape(text)}'"


def escape(text: str) -> str:
    """Returns text as it stands between single quotes in an override."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


def did_you_mean(group: str, option: Any, options: Sequence[str]) -> str:
    """Returns the fix for an option that a group does not have."""
    typed = str(option).lower()
    meant = OPTION_WORDS.get(group, {}).get(typed)
    longer = [name for name in options if name.startswith(f"{typed}-")]  # such as -base and -instruct of a model
    nearest = [meant] if meant else longer[:2] or difflib.get_close_matches(typed, options, n=1, cutoff=0.5)
    names = " or ".join(f"{group}={name}" for name in nearest)
    return f"Did you mean {names}?" if nearest else f"Set {group} to one of these."


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


def _written_out(text: str, folders: Sequence[Path], sweep: bool) -> list[str]:
    """The overrides that one stands for: `data=chats.jsonl` is `data=default` and `data.path=chats.jsonl`."""
    group, _, value = text.lstrip("+").partition("=")
    values = _split(value) if sweep else [value]
    if not all(is_path(group, value.strip("'\""), folders) for value in values):
        return [text]
    return [f"{group}={default_options()[group]}", f"{group}.path={value}"]


@cache
def _parser() -> OverridesParser:
    """Hydra's, to be used again: it takes longer to make one than to read most overrides."""
    return OverridesParser.create()


def _parse(text: str, sweep: bool) -> Override | Problem:
    parser = _parser()
    key, equals, value = text.partition("=")
    if not equals and key.endswith((".yaml", ".yml")):
        return Problem(text, "is not of the form key=value.", f"Did you mean --config {text}?")
    if not equals and not key.startswith("~"):
        return Problem(text, "is not of the form key=value.", _meant(text))
    setting = all_settings().get(key.lstrip("+"))
    forms = [text]
    if setting is not None and setting.has_texts:
        forms.insert(0, f"{key}={_quote_words(value)}")
    for form in forms:
        with suppress(HydraException):
            return parser.parse_overrides([form])[0]
    values = [_readable(key, value, setting) for value in (_split(value) if sweep else [value])]
    if None in values:
        return _unreadable(text, key, value, setting)
    return parser.parse_overrides([f"{key}={','.join(map(str, values))}"])[0]


def _unreadable(text: str, key: str, value: str, setting: Setting | None) -> Problem:
    """The problem with a value that Hydra can't read in any form."""
    closing = _unclosed(value)
    if value.endswith(","):
        fix = f"Leave the comma out, or write the values of a sweep without spaces: {key}={value}..."
        return Problem(text, "can't be read: it ends with a comma.", fix)
    if setting is not None and setting.takes_mapping:
        reason = f"can't be read: {closing} is missing at its end." if closing else "can't be read."
        others = "Names with quotes, or letters other than ASCII's, go into a file of --config."
        return Problem(text, reason, f"Write it as {example_of(key)}. {others}")
    if closing:
        return Problem(text, f"can't be read: {closing} is missing at its end.", f"Write {key}='{value}{closing}'.")
    quoted = '["...","..."]' if setting is not None and setting.takes_list else '"..."'
    return Problem(text, "can't be read.", f"Put quotes around special characters: {key}='{quoted}'.")


def _unclosed(value: str) -> str:
    """The brackets that are missing at the end of a value: those that close what it opens outside of quotes."""
    missing = ""
    for letter in QUOTED.sub("", value):
        if letter in CLOSING:
            missing = CLOSING[letter] + missing
        elif missing.startswith(letter):
            missing = missing[1:]
    return missing


def _split(text: str) -> list[str]:
    """The values of a sweep: what stands between commas that are within no quotes and no brackets."""
    return VALUE.findall(f"{text},")


def _readable(key: str, value: str, setting: Setting | None) -> str | None:
    """A value in the form that Hydra reads, which has no unquoted ~, =, (, < or letters outside ASCII; None: no form.

    Such characters are common in paths and new tokens.
    """
    parser = _parser()
    items = value.removeprefix("[").removesuffix("]")
    forms = [value]
    if setting is not None and setting.takes_list and value == f"[{items}]" and not set("[]'\"") & set(items):
        forms.append(f"[{','.join(quote(item.strip()) for item in items.split(','))}]")
    elif setting is not None and get_origin(setting.type) is dict:
        forms += filter(None, [_escape_keys(value)])
    elif setting is not None and (setting.type is str or setting.facets.text_or_list):
        forms.append(quote(value))
    for form in forms if value else ():
        with suppress(HydraException):
            if not parser.parse_overrides([f"{key}={form}"])[0].is_sweep_override():
                return form
    return None


def _quote_words(text: str) -> str:
    """A text, or a list or mapping of texts, whose items Hydra leaves as they are: 1.10 and true are texts too."""
    if set("'\"()$\\") & set(text):  # it has quotes, a sweep's function or ${...}
        return text
    return WORD.sub(lambda found: found[1] + (quote(found[2]) if _is_no_text(found[2]) else found[2]), text)


def _is_no_text(word: str) -> bool:
    """Whether Hydra takes an unquoted word for a number or for true or false."""
    if word.lower() in ("true", "false"):
        return True
    try:
        float(word)  # which reads underscores, inf and nan as Hydra does
    except ValueError:
        return False
    return True


def _escape_keys(text: str) -> str | None:
    """A mapping in YAML's form, whose keys may be quoted paths or URLs, as Hydra reads it; None: it is no such."""
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return _write_mapping(mapping) if isinstance(mapping, dict) else None


def _write_mapping(mapping: dict[Any, Any]) -> str | None:
    """A mapping, whose values may be mappings, as Hydra reads it; None: it has lists."""
    items = []
    for key, value in mapping.items():
        written = _write_item(value)
        if written is None:
            return None
        escaped = re.sub(SPECIAL, r"\\\1", str(key))
        items.append(f"{escaped}: {written}")
    return f"{{{', '.join(items)}}}"


def _write_item(value: Any) -> str | None:
    """A value of a mapping as Hydra reads it; None: it is, or has, a list."""
    if isinstance(value, dict):
        return _write_mapping(value)
    if isinstance(value, list):
        return None
    if isinstance(value, str):
        return quote(value)
    return "null" if value is None else str(value)


def _meant(word: str) -> str:
    """The fix for a word without an equals sign, which may be an option of a group or the name of a setting."""
    folders = [conf_folder()]
    groups = [group for group in group_options("", folders) if word in group_options(group, folders)]
    meant = [f"{group}={word}" for group in groups] or [f"{key}=VALUE" for key in nearest_settings(word)]
    if not groups and is_path("data", word, folders):
        meant = [f"data={word}"]
    return f"Did you mean {' or '.join(meant[:2])}?" if meant else "See --help for examples."


def _is_of_other_kind(key: str, value: Any) -> bool:
    """Whether a list is given for a mapping, or a mapping for a list: neither can be made of the other."""
    kind = get_origin(all_settings()[key].type) if key in all_settings() else None
    return (kind is dict and isinstance(value, list)) or (kind is list and isinstance(value, dict))


def _unknown_option(group: str, option: Any, options: Sequence[str]) -> Problem:
    """The problem with an option that a group does not have."""
    fix = did_you_mean(group, option, options)
    if option is None and default_options().get(group, "") is None:
        fix = f"Leave {group} out for none."
    if group in ("model", "data") and isinstance(option, str):
        fix += f" For a path or a hub name set {group}.path={option}."
    near = difflib.get_close_matches(str(option).lower(), options, n=6, cutoff=0.4)
    if len(options) <= MAX_LISTED:
        listed = f"it has {', '.join(options)}"
    elif near:
        listed = f"it has {', '.join(near)} and others (docs/configuration.md)"
    else:
        listed = "docs/configuration.md lists them"
    return Problem(show(group, option), f"is no option of {group}: {listed}.", fix)
