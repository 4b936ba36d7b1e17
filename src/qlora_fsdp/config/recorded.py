"""The settings of a run as its files have them, and which of them have changed. Imports no torch.

A run is recorded in files that people share: its config.yaml, the report, checkpoints, the adapter, W&B's pages. The
environment often holds keys. So a value that `${oc.env:TEAM}` takes from the environment is never recorded; the text
that the user wrote is recorded in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import Problem
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.config.bounded_yaml import read_yaml
from qlora_fsdp.config.schema import Config, Weights
from qlora_fsdp.config.settings import all_settings, value_of

MAX_CHAIN = 8  # settings that name one another, in a run's config.yaml
MAX_NAMED_LETTERS = 1000  # of a setting that another one names


MAX_LETTERS = 2**20  # of a setting once it is resolved
MIN_LETTERS = 4  # of a value that is looked for in texts: shorter ones stand there by chance
_OTHER_SETTING = re.compile(r"\$\{([a-z]\w*\.\w+)\}")
_ANY_NAME = re.compile(r"\$\{([\w.]+)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)")
_hidden_texts: dict[str, str] = {}  # what the environment gave, and what was written for it


def plain_settings(config: Config) -> dict[str, Any]:
    """Returns every setting of a run by its key, as JSON has it, and without what the environment gave."""
    recorded = (key for key, setting in all_settings().items() if setting.facets.run.is_recorded)
    return {key: _plain(public_value(config, key)) for key in recorded}


def sections_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns settings by section and name."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def read_settings(file: Path) -> dict[str, Any]:
    """Returns every setting in a run's config.yaml by its key, as JSON has it; empty if there is no such file."""
    try:
        sections = read_yaml(file) if file.is_file() else {}
    except (OSError, ValueError):
        return {}
    found = dict(by_key(sections)) if isinstance(sections, dict) else {}
    for _ in range(MAX_CHAIN):
        filled = {key: fill_in(value, partial(_find_short, found)) for key, value in found.items()}
        if filled == found:
            break
        found = filled
    return found


def _find_short(found: Mapping[str, Any], key: str) -> Any:
    """A setting's value for another one's `${...}`, unless it is long: it may be others' text, made to grow."""
    value = found.get(key)
    return f"${{{key}}}" if value is None or len(str(value)) > MAX_NAMED_LETTERS else value


def find_changes(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ, with the new and the old value. A setting that was not yet had its default."""
    was = {key: old[key] if key in old else plain_default(key) for key in new}
    return {key: (value, was[key]) for key, value in new.items() if value != was[key]}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def plain_default(key: str) -> Any:
    """Returns the default of a setting, as JSON has it, for what was written before the setting existed."""
    return _plain(all_settings()[key].default)


def find_unresolvable(written: Mapping[str, Any]) -> list[Problem]:
    """Returns why settings, by section and name, must not be resolved: one reads the clock, or they grow too long."""
    return [*_find_clocks(written), *_find_growth(written)]


def note_written(config: Config, composed: Mapping[str, Any]) -> None:
    """Keeps in `config.written` what is written for settings, by section and name, where this has a `${...}`."""
    for key, value in by_key(composed):
        if key in all_settings() and "${" in str(value):
            config.written[key] = value
    for key in config.written:
        if is_hidden(config, key):
            _note_hidden(str(config.written[key]), value_of(config, key))


def is_hidden(config: Config, key: str) -> bool:
    """Whether the environment gave the value of a setting, so that the files of a run must not have it."""
    return public_value(config, key) is not value_of(config, key)


def public_value(config: Config, key: str) -> Any:
    """Returns the value of a setting for the files of a run: what was written, if the environment gave it.

    A path that exists here is named, and so is the model that was loaded: without it nobody could use the adapter.
    """
    value = value_of(config, key)
    if key not in config.written:
        return value
    written = fill_in(config.written[key], lambda other: public_value(config, other))
    is_model = key == "model.path" and config.model.weights is Weights.checkpoint
    is_here = isinstance(value, str) and value.startswith(("/", "~")) and path_exists(value)
    if "${" not in str(written) or is_model or is_here:
        return value
    return written


def fill_in(value: Any, find: Callable[[str], Any]) -> Any:
    """Returns a value in which every `${section.name}` is replaced by what `find` knows of that setting."""
    if isinstance(value, dict):
        return {key: fill_in(item, find) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item, find) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _OTHER_SETTING.fullmatch(value)
    return find(whole[1]) if whole else _OTHER_SETTING.sub(lambda match: str(find(match[1])), value)


def hide(text: str) -> str:
    """Returns a text for the files of a run, such as a line of the log, without what the environment gave."""
    for value in sorted(_hidden_texts, key=len, reverse=True):
        text = text.replace(value, _hidden_texts[value])
    return text


def _find_clocks(written: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in by_key(written):
        if isinstance(value, str) and "${now:" in value:
            reason = "reads the clock on every rank by itself: the ranks would disagree."
            fix = f'Let the shell do it: {key}="$(date +%Y-%m-%d_%H-%M)".'
            yield Problem(f"{key}={value}", reason, fix)


def _find_growth(written: Mapping[str, Any]) -> Iterator[Problem]:
    """A few settings that name one another several times can stand for more text than there is memory."""
    texts = {key: str(value) for key, value in by_key(written)}
    named = {key: _ANY_NAME.findall(text) for key, text in texts.items() if "${" in text}
    lengths = {key: len(text) for key, text in texts.items()}
    for _ in named:  # the longest chain of settings that name one another
        longer = {}
        for key, others in named.items():
            longer[key] = len(texts[key]) + sum(lengths.get(other, 0) for other in others)
            if longer[key] > MAX_LETTERS:
                reason = f"stands for more than {MAX_LETTERS:,} letters: the settings that it names name others."
                yield Problem(key, reason, "Write its value without ${...}.")
                return
        lengths |= longer


def by_key(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields settings that are given by section and name with their keys."""
    for section, values in written.items():
        if isinstance(values, dict):
            for name, value in values.items():
                yield f"{section}.{name}", value


def _note_hidden(written: str, value: Any) -> None:
    given = {os.environ.get(name, ""): f"${{oc.env:{name}}}" for name in _VARIABLE.findall(written)}
    if isinstance(value, str):
        given[value] = written
    _hidden_texts.update({text: shown for text, shown in given.items() if len(text) >= MIN_LETTERS and text != shown})
