"""What Hydra composes from: the schema's defaults and folders of YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.config_file import Sections
from qlora_fsdp.config.overrides import quote
from qlora_fsdp.config.schema import Config

# Hydra reads the folders of --config-dir by src/hydra_plugins/qlora_fsdp_folders.py, which checks their files.
FOLDER_SCHEME = "settings://"

# What stands in the place of the schema's defaults while settings are composed: those of an adapter (`lora.start`).
stand_ins: ContextVar[Sections | None] = ContextVar("stand_ins", default=None)


def register_schema(given: Sections | None = None) -> None:
    """Gives Hydra what conf/config.yaml names besides files: the schema's defaults, and values of `read_given`."""
    register_defaults()
    ConfigStore.instance().store("given", node=given or {})


def register_defaults() -> None:
    """Gives Hydra the schema's defaults, with `stand_ins` in the place of some."""
    instead = stand_ins.get() or {}
    defaults = {section: {**names, **instead.get(section, {})} for section, names in _defaults().items()}
    ConfigStore.instance().store("schema", node=defaults)


@cache
def _defaults() -> Any:
    return OmegaConf.to_container(typed_defaults(), enum_to_str=True)


@cache
def typed_defaults() -> DictConfig:
    """The schema with its defaults, to be copied: a copy takes a fifth of the time that it takes to make it anew."""
    return OmegaConf.structured(Config)  # type: ignore[no-any-return]


@contextmanager
def composing(folders: Sequence[Path], given: Sections) -> Iterator[str]:
    """Wraps what Hydra does with conf/config.yaml, and gives the override that makes it look into all `folders`.

    Args:
        folders: where groups of options are, first the project's own.
        given: values that win over all options, by section and name.

    Raises:
        ConfigError: Hydra stopped; the message is Hydra's.
    """
    register_schema(given)
    extra = ",".join(quote(f"{FOLDER_SCHEME}{folder}") for folder in folders[1:])
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="train"):
            yield f"hydra.searchpath=[{extra}]"
    except InterpolationResolutionError as error:
        raise ConfigError([explain_interpolation(error)]) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_explain(error)]) from None


def _explain(error: Exception) -> Problem:
    """Hydra's own message, in one line."""
    message, _, _ = str(error if str(error).strip() else error.__cause__ or error).partition("Config search path")
    text = " ".join(message.split())
    fix = "See docs/configuration.md, and for hydra.* Hydra's own pages."
    if re.match(r"In '.+': Could not override '.+@.+'", text):
        fix = "Begin the file with the line `# @package _global_`."
    if "does not support sweep type" in text:
        fix = "List the values (a,b), or name the sweeper: hydra/sweeper=optuna (docs/sweeps.md)."
    end = "" if text.endswith((".", "?")) else "."
    return Problem("The settings", f"can't be composed: {text}{end}", fix)


def explain_interpolation(error: OmegaConfBaseException) -> Problem:
    """Explain an error of `${...}` in a value."""
    reason = f"can't be resolved: {first_line(error)}."
    fix = "Name an existing setting in ${...}."
    if "Environment variable" in reason:
        fix = "Set the variable, or write ${oc.env:NAME,VALUE} with what counts without it."
    key = error.full_key or ""
    is_ours = key != "" and not key.startswith("hydra.")  # Hydra's own folder is made of run.folder
    return Problem(key if is_ours else "A value with ${...}", reason, fix)
