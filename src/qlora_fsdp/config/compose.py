"""Makes a typed `Config` of the command line and the YAML files.

Hydra composes plain values: the schema's defaults, then one option of each group, then an experiment, then the
overrides. Only the result is checked against the schema, in one walk. This finds a key that the schema does not know
wherever it comes from (a user's YAML file, `key=`, `+key=` or `++key=`), and reports all such mistakes at once. Hydra
itself would stop at the first mistake, and would accept any key behind a plus sign.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.check_settings import check_settings
from qlora_fsdp.config.command_line import Arguments, group_options, help_text, parse_arguments
from qlora_fsdp.config.overrides import did_you_mean, escape, prepare_overrides
from qlora_fsdp.config.schema import Config, Dtype
from qlora_fsdp.config.settings import all_settings, unknown_setting, wrong_type


def load_config(
    argv: Sequence[str], check: Callable[[Config], list[Problem]] = check_settings, launches: bool = False
) -> Config:
    """Reads the command line and composes the configuration.

    `--help` and `--cfg job` print, on rank 0, and exit.

    Args:
        argv: the arguments behind the program's name, e.g. `["model=llama3-8b", "lora.r=32"]`.
        check: finds what else is wrong with a configuration. It is called where the command line has mistakes, so that
            the user sees both at once.
        launches: whether this process starts ranks, so that settings of `launch` have an effect.

    Returns:
        The configuration, typed and with all interpolations resolved. It is well formed but not yet checked.

    Raises:
        ConfigError: unknown keys or options, wrong types, unreadable overrides or YAML: all that were found.
    """
    arguments = parse_arguments(argv)
    if arguments.help:
        _print_and_exit(help_text(arguments.folders))

    overrides, unusable = prepare_overrides(arguments.overrides, arguments.folders)
    unusable += _without_effect(arguments, launches)
    config, mistakes = read_config(_compose(overrides, arguments.folders))
    if unusable:
        raise ConfigError([*unusable, *mistakes])
    if mistakes:
        # The rest is checked too, without the defaults that stand in for the mistaken values.
        mistaken = {problem.setting for problem in mistakes}
        raise ConfigError([*mistakes, *(problem for problem in check(config) if problem.setting not in mistaken)])
    if arguments.cfg:
        _print_and_exit(to_yaml(config))
    return config


def to_yaml(config: Config) -> str:
    """Returns the configuration as YAML, which a folder of `--config-dir` can hold as an experiment."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def register_schema() -> None:
    """Gives Hydra the schema's defaults under the name that conf/config.yaml starts from."""
    ConfigStore.instance().store("schema", node=_defaults())


@cache
def _defaults() -> Any:
    return OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)


def read_config(composed: DictConfig) -> tuple[Config, list[Problem]]:
    """Checks composed plain values against the schema.

    Args:
        composed: what Hydra made of YAML and overrides, by section and name.

    Returns:
        The typed configuration, with the default wherever a value can't be used, and a problem for each of those.

    Raises:
        ConfigError: an interpolation can't be resolved.
    """
    _refuse_clock(composed)
    try:
        values = _as_dict(composed, resolve=True)
    except OmegaConfBaseException as error:
        reason = f"can't be resolved: {_first_line(error)}."
        raise ConfigError(
            [Problem(error.full_key or "${...}", reason, "Name an existing setting in ${...}.")]
        ) from None

    typed = OmegaConf.structured(Config)
    problems = []
    for section, section_values in values.items():
        if not isinstance(section_values, dict):
            problems.append(unknown_setting(section, section_values))
            continue
        for name, value in section_values.items():
            key = f"{section}.{name}"
            if key not in all_settings():
                problems.append(unknown_setting(key, value))
                continue
            try:
                typed[section][name] = value
            except OmegaConfBaseException:
                problems.append(wrong_type(key, value))
    config = OmegaConf.to_object(typed)
    assert isinstance(config, Config)
    compute = config.quant.bnb_4bit_compute_dtype
    if config.quant.load_in_4bit and compute is not Dtype.float16 and config.training.precision is Dtype.auto:
        config.training.precision = compute  # products and activations have one dtype, and this one is asked for
    return config, problems


def _print_and_exit(text: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text.rstrip())
    raise SystemExit(0)


def _compose(overrides: list[str], folders: Sequence[Path]) -> DictConfig:
    with composing(folders) as search_path:
        return compose("config", overrides=[*overrides, search_path])


@contextmanager
def composing(folders: Sequence[Path]) -> Iterator[str]:
    """Wraps what Hydra does with conf/config.yaml, and gives the override that makes it look into all `folders`.

    Raises:
        ConfigError: Hydra or the YAML parser stopped.
    """
    register_schema()
    extra = ",".join(f"'file://{escape(str(folder))}'" for folder in folders[1:])
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="train"):
            yield f"hydra.searchpath=[{extra}]"
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([_explain(error, folders)]) from None


def _without_effect(arguments: Arguments, launches: bool) -> list[Problem]:
    """Refuses settings of the launch for a run that this process does itself."""
    texts = [] if arguments.starts_jobs else arguments.overrides
    sections = ("slurm.",) if launches else ("launch.", "slurm.")
    return [
        Problem(
            text,
            "has no effect here: nothing is launched.",
            "Start it as `qlora-fsdp train`, or add -m, hydra/launcher=accelerate or hydra/launcher=slurm."
            if text.lstrip("+").startswith("launch.")
            else "Add hydra/launcher=slurm.",
        )
        for text in texts
        if text.lstrip("+").startswith(sections)
    ]


def _refuse_clock(composed: DictConfig) -> None:
    for section, values in _as_dict(composed, resolve=False).items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, str) and "${now:" in value:
                reason = "reads the clock on every rank by itself: the ranks would disagree."
                fix = f'Let the shell do it: {section}.{name}="$(date +%Y-%m-%d_%H-%M)".'
                raise ConfigError([Problem(f"{section}.{name}={value}", reason, fix)])


def _as_dict(composed: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _explain(error: Exception, folders: Sequence[Path]) -> Problem:
    """What Hydra or the YAML parser stopped at, in the words of this project."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1},"
        return Problem(place, f"is not valid YAML: {error.problem}.", "Correct this file.")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        options = group_options(group, folders)
        return Problem(
            f"{group}={option}" if group else option,
            f"is in a defaults list but does not exist: {group or 'this folder'} has {', '.join(options) or 'none'}.",
            did_you_mean(group, option, options),
        )
    return Problem("The YAML files", f"can't be composed: {_first_line(error)}", "See the files under --config-dir.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or (str(error.__cause__) if error.__cause__ else type(error).__name__)
