"""What Hydra composes from: the schema's defaults and folders of YAML; and Hydra's errors in this project's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.command_line import group_options
from qlora_fsdp.config.config_file import Sections
from qlora_fsdp.config.overrides import did_you_mean, escape
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
        ConfigError: Hydra or the YAML parser stopped.
    """
    register_schema(given)
    extra = ",".join(f"'{FOLDER_SCHEME}{escape(str(folder))}'" for folder in folders[1:])
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="train"):
            yield f"hydra.searchpath=[{extra}]"
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([_explain(error, folders)]) from None


def _explain(error: Exception, folders: Sequence[Path]) -> Problem:
    """Explain an error of Hydra or the YAML parser in the words of this project."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1},"
        return Problem(place, f"is not valid YAML: {error.problem}.", "Correct this file.")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        options = group_options(group, folders[:1] if group.startswith("hydra/") else folders)
        return Problem(
            f"{group}={option}" if group else option,
            f"is in a defaults list but does not exist: {group or 'this folder'} has {', '.join(options) or 'none'}.",
            did_you_mean(group, option, options),
        )
    if isinstance(error, InterpolationResolutionError):
        return explain_interpolation(error)
    if found := re.match(r"Error merging override \+*(.+)", str(error)):
        fix = "Write ${section.name} for the value of another setting."
        return Problem(found[1], f"can't be read: {_first_line(error.__cause__ or error)}.", fix)
    if found := re.match(r"Could not override '(.+)'", str(error)):
        fix = "See docs/configuration.md, and for hydra.* Hydra's own pages."
        return Problem(found[1], "is neither a setting nor a group of options.", fix)
    if found := re.match(r"In '(.+)': Could not override '(.+)@.+'", str(error)):
        fix = "Begin the file with the line `# @package _global_`."
        return Problem(f"{found[1]}.yaml", f"looks for the group {found[2]} inside its own group.", fix)
    if "does not support sweep type" in str(error):
        fix = "List the values (a,b), or name the sweeper: hydra/sweeper=optuna (docs/sweeps.md)."
        return Problem("interval(...)", "is drawn from by sweepers of other packages.", fix)
    return Problem("The YAML files", f"can't be composed: {_first_line(error)}", "See the files under --config-dir.")


def explain_interpolation(error: OmegaConfBaseException) -> Problem:
    """Explain an error of `${...}` in a value."""
    reason, fix = f"can't be resolved: {_first_line(error)}.", "Name an existing setting in ${...}."
    if "Environment variable" in reason:
        fix = "Set the variable, or write ${oc.env:NAME,VALUE} with what counts without it."
    key = error.full_key or ""
    is_ours = key and not key.startswith("hydra.")  # Hydra's own folder is made of run.folder
    return Problem(key if is_ours else "A value with ${...}", reason, fix)


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, or of the error behind it if it has none."""
    return first_line(error if str(error).strip() else error.__cause__ or error)
