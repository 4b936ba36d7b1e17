"""Which settings make a run what it is, and which may change without making it another run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.settings import all_settings, value_of

# These settings change no number, or only the rounding of sums. Any other setting is part of what the run is.
_HARMLESS_SECTIONS = (
    "run",
    "fsdp",
    "memory",
    "kernels",
    "checkpoint",
    "tracking",
    "hub",
    "distributed",
    "launch",
    "slurm",
)
_HARMLESS = (
    "model.name",
    "model.attn_implementation",
    "model.cache_quantized",
    "model.cache_folder",
    "model.trust_remote_code",
    "data.num_proc",
    "data.cache_folder",
    "training.micro_batch_size",
    "training.eval_every_steps",
    "training.on_bad_step",
    "training.grad_norm_spike",
)


def is_harmless(key: str) -> bool:
    """Whether a run with another value of this setting is still the same run."""
    return key.partition(".")[0] in _HARMLESS_SECTIONS or key in _HARMLESS


def plain_settings(config: Config) -> dict[str, Any]:
    """Returns every setting by its key, as JSON has it."""
    return {key: _plain(value_of(config, key)) for key in all_settings()}


def read_settings(file: Path) -> dict[str, Any]:
    """Returns every setting in a run's config.yaml by its key, as JSON has it; empty if there is no such file."""
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    sections = sections if isinstance(sections, dict) else {}
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


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
