"""The settings of a run as its files have them, and which of them have changed. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from qlora_fsdp.config.bounded_yaml import read_yaml
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import all_settings
from qlora_fsdp.config.written import by_key, fill_in, public_value

MAX_CHAIN = 8  # settings that name one another, in a run's config.yaml
MAX_LETTERS = 1000  # of a setting that another one names


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
    return f"${{{key}}}" if value is None or len(str(value)) > MAX_LETTERS else value


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
