"""Overrides as they are typed, in the form that Hydra needs, and the mistakes in them. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub_names import path_exists
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
OTHER_NAMES = {"quant": {"4bit": "nf4", "int4": "nf4", "bnb-4bit": "nf4", "8bit": "int8", "bnb-8bit": "int8"}}
SPECIAL, BACKSLASHED = r"([\\()\[\]{}:=, ])", r"\\\1"  # characters of keys that Hydra reads only after a backslash
VALUE = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\[[^\]]*\]|\{[^}]*\}|[^,])*),""")  # of a sweep
WORD = re.compile(r"((?:^|[\[,:{])\s*)([\w.+-]+)(?=\s*(?:[,\]}]|$))")  # an item that may look like a number


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
    usable, problems = [], []
    full_texts = [full for text in texts for full in _written_out(text, folders, sweep)]
    for text in full_texts:
        override = _parse(text, sweep)
        if isinstance(override, Problem):
            problems.append(override)
            continue
        key, options = override.key_or_group, group_options(override.key_or_group, folders)
        if key in FORMER:
            problems.append(unknown_setting(key, text.partition("=")[2]))
        elif key.startswith("hydra/") and override.value() is None:  # Hydra would end with a traceback
            problems.append(Problem(text, "names no option.", f"Leave {key} out."))
        elif key.startswith(("hydra.", "hydra/")):
            usable.append(text)
        elif override.is_delete():
            problems.append(Problem(text, "removes a setting, which is not possible.", "Set it to another value."))
        elif override.is_sweep_override() and not sweep:
            value, setting = text.partition("=")[2], all_settings().get(key)
            is_open = not options if setting is None else not setting.words  # it takes more than a few values
            kind = getattr(setting, "type", Any) if is_open else None
            fix = "For a sweep add -m"
            fix += f", for a list write {key}=[{value}]" if kind is Any or get_origin(kind) is list else ""
            fix += f", for a text with a comma {key}='\"{value}\"'." if kind in (Any, str) else "."
            fix += several_data_sets(key)
            problems.append(Problem(text, "gives several values to one run.", fix))
        elif isinstance(glob := override.value(), Glob) and not glob.filter(options):
            reason = f"matches no option of {key}, which has {', '.join(options) or 'none'}."
            problems.append(Problem(text, reason, f"Set {key}=glob(*)." if options else f"List the values: {key}=a,b."))
        elif options and (found := [p for v in _values(override) if (p := _check_option(key, v, options))]):
            problems += found
        elif other_kind := [value for value in _values(override) if _is_list_for_mapping(key, value)]:
            problems += [wrong_type(key, value) for value in other_kind]  # Hydra stops at the first
        else:
            if isinstance(glob, Glob):  # Hydra itself does not look into --config-dir for these
                override.input_line = f"{key}={','.join(glob.filter(options))}"
            # Hydra wants a plus sign for what its defaults do not name. The check against the schema comes later.
            plus = "" if group_options(key, folders[:1]) else "+" if options else "++"
            usable.append(plus + (override.input_line or text).lstrip("+"))
    return usable, problems


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
    meant = OTHER_NAMES.get(group, {}).get(typed)
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
    for form in (f"{key}={_quote_words(value)}" if setting is not None and setting.has_texts else text, text):
        with suppress(HydraException):
            return parser.parse_overrides([form])[0]
    values = [_readable(key, value, setting) for value in (_split(value) if sweep else [value])]
    if None not in values:
        return parser.parse_overrides([f"{key}={','.join(map(str, values))}"])[0]
    if value.endswith(","):
        fix = f"Leave the comma out, or write the values of a sweep without spaces: {key}={value}..."
        return Problem(text, "can't be read: it ends with a comma.", fix)
    if setting is not None and setting.takes_mapping:
        others = "Names with quotes, or letters other than ASCII's, go into a file of --config."
        return Problem(text, "can't be read.", f"Write it as {example_of(key)}. {others}")
    quoted = '["...","..."]' if setting is not None and setting.takes_list else '"..."'
    return Problem(text, "can't be read.", f"Put quotes around special characters: {key}='{quoted}'.")


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
        written = (
            _write_mapping(value) if isinstance(value, dict) else quote(value) if isinstance(value, str) else value
        )
        if (written is None and value is not None) or isinstance(value, list):
            return None
        items.append(f"{re.sub(SPECIAL, BACKSLASHED, str(key))}: {'null' if written is None else written}")
    return f"{{{', '.join(items)}}}"


def _meant(word: str) -> str:
    """The fix for a word without an equals sign, which may be an option of a group or the name of a setting."""
    folders = [conf_folder()]
    groups = [group for group in group_options("", folders) if word in group_options(group, folders)]
    meant = [f"{group}={word}" for group in groups] or [f"{key}=VALUE" for key in nearest_settings(word)]
    if not groups and is_path("data", word, folders):
        meant = [f"data={word}"]
    return f"Did you mean {' or '.join(meant[:2])}?" if meant else "See --help for examples."


def _values(override: Override) -> list[Any]:
    """The value of an override, or all values of a sweep. A glob gives none: it matches options that are there."""
    if isinstance(override.value(), Glob):
        return []
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]


def _is_list_for_mapping(key: str, value: Any) -> bool:
    """Whether a list is given for a mapping, or a mapping for a list: neither can be made of the other."""
    kind = get_origin(all_settings()[key].type) if key in all_settings() else None
    return (kind is dict and isinstance(value, list)) or (kind is list and isinstance(value, dict))


def _check_option(group: str, option: Any, options: Sequence[str]) -> Problem | None:
    if option in options:
        return None
    fix = did_you_mean(group, option, options)
    if option is None and default_options().get(group, "") is None:
        fix = f"Leave {group} out for none."
    if group in ("model", "data") and isinstance(option, str):
        fix += f" For a path or a hub name set {group}.path={option}."
    listed = f"it has {', '.join(options)}"
    if len(options) > MAX_LISTED:
        near = difflib.get_close_matches(str(option).lower(), options, n=6, cutoff=0.4)
        listed = (
            f"it has {', '.join(near)} and others (docs/configuration.md)"
            if near
            else "docs/configuration.md lists them"
        )
    return Problem(show(group, option), f"is no option of {group}: {listed}.", fix)
