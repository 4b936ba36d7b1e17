"""Makes a typed `Config` of the command line and the YAML files.

Hydra composes plain values: the schema's defaults, then one option of each group, then an experiment, then the
overrides. Only the result is checked against the schema, in one walk. This finds a key that the schema does not know
wherever it comes from (a user's YAML file, `key=`, `+key=` or `++key=`), and reports all such mistakes at once. Hydra
itself would stop at the first mistake, and would accept any key behind a plus sign.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.check_settings import check_settings
from qlora_fsdp.config.command_line import Arguments, group_options, help_text, parse_arguments
from qlora_fsdp.config.schema import Config, Dtype
from qlora_fsdp.config.settings import all_settings, nearest_settings, problem_about, show

_SEVERAL_DATA_SETS = " For several data sets set data.mix={a.jsonl: 1, b.jsonl: 1} in its place."


def load_config(argv: Sequence[str], check: Callable[[Config], list[Problem]] = check_settings) -> Config:
    """Reads the command line and composes the configuration.

    `--help` and `--cfg job` print, on rank 0, and exit.

    Args:
        argv: the arguments behind the program's name, e.g. `["model=llama3-8b", "lora.r=32"]`.
        check: finds what else is wrong with a configuration. It is called where the command line has mistakes, so that
            the user sees both at once.

    Returns:
        The configuration, typed and with all interpolations resolved. It is well formed but not yet checked.

    Raises:
        ConfigError: unknown keys or options, wrong types, unreadable overrides or YAML: all that were found.
    """
    arguments = parse_arguments(argv)
    if arguments.help:
        _print_and_exit(help_text(arguments.folders))

    overrides, unusable = prepare_overrides(arguments.overrides, arguments.folders)
    unusable += _without_effect(arguments)
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
    for text in texts:
        override = _parse(text, sweep)
        if isinstance(override, Problem):
            problems.append(override)
            continue
        key, options = override.key_or_group, group_options(override.key_or_group, folders)
        if key.startswith(("hydra.", "hydra/")):
            usable.append(text)
        elif override.is_delete():
            problems.append(Problem(text, "removes a setting, which is not possible.", "Set it to another value."))
        elif override.is_sweep_override() and not sweep:
            value, setting = text.partition("=")[2], all_settings().get(key)
            kind = Any if setting is None else setting.type
            fix = "For a sweep add -m"
            fix += f", for a list write {key}=[{value}]" if kind is Any or get_origin(kind) is list else ""
            fix += f", for a text with a comma {key}='\"{value}\"'." if kind in (Any, str) else "."
            fix += _SEVERAL_DATA_SETS if key == "data.path" else ""
            problems.append(Problem(text, "gives several values to one run.", fix))
        elif isinstance(glob := override.value(), Glob) and not glob.filter(options):
            reason = f"matches no option of {key}, which has {', '.join(options) or 'none'}."
            problems.append(Problem(text, reason, f"Set {key}=glob(*)." if options else f"List the values: {key}=a,b."))
        elif options and (found := [p for v in _values(override) if (p := _check_option(key, v, options))]):
            problems += found
        elif other_kind := [value for value in _values(override) if _is_list_for_mapping(key, value)]:
            problems += [_wrong_type(key, value) for value in other_kind]  # Hydra stops at the first
        else:
            if isinstance(glob, Glob):  # Hydra itself does not look into --config-dir for these
                override.input_line = f"{key}={','.join(glob.filter(options))}"
            # Hydra wants a plus sign for what its defaults do not name. The check against the schema comes later.
            plus = "" if group_options(key, folders[:1]) else "+" if options else "++"
            usable.append(plus + (override.input_line or text).lstrip("+"))
    return usable, problems


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
            problems.append(_unknown(section, section_values))
            continue
        for name, value in section_values.items():
            key = f"{section}.{name}"
            if key not in all_settings():
                problems.append(_unknown(key, value))
                continue
            try:
                typed[section][name] = value
            except OmegaConfBaseException:
                problems.append(_wrong_type(key, value))
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
    extra = ",".join(f"'file://{_escape(str(folder))}'" for folder in folders[1:])
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="train"):
            yield f"hydra.searchpath=[{extra}]"
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([_explain(error, folders)]) from None


def _without_effect(arguments: Arguments) -> list[Problem]:
    """Refuses settings of the launch for a run that this process does itself."""
    texts = [] if arguments.starts_jobs else arguments.overrides
    fix = "Add -m, hydra/launcher=accelerate or hydra/launcher=slurm."
    return [
        Problem(text, "has no effect here: nothing is launched.", fix)
        for text in texts
        if text.lstrip("+").startswith(("launch.", "slurm."))
    ]


def _is_list_for_mapping(key: str, value: Any) -> bool:
    """Whether a list is given for a mapping, or a mapping for a list: neither can be made of the other."""
    kind = get_origin(all_settings()[key].type) if key in all_settings() else None
    return (kind is dict and isinstance(value, list)) or (kind is list and isinstance(value, dict))


def _values(override: Override) -> list[Any]:
    """The value of an override, or all values of a sweep. A glob gives none: it matches options that are there."""
    if isinstance(override.value(), Glob):
        return []
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]


def _parse(text: str, sweep: bool = False) -> Override | Problem:
    parser = OverridesParser.create()
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        return Problem(text, "is not of the form key=value.", "See --help for examples.")
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        pass
    # Hydra's grammar has no unquoted ~, =, (, < or letters outside ASCII, which are common in paths and new tokens.
    setting = all_settings().get(key.lstrip("+"))
    if setting is not None and setting.type is str:
        values = value.split(",") if sweep else [value]
        return parser.parse_overrides([f"{key}={','.join(quote(value) for value in values)}"])[0]
    items = value.removeprefix("[").removesuffix("]")
    if setting is not None and setting.type == list[str] and value == f"[{items}]" and not set("[]'\"") & set(items):
        return parser.parse_overrides([f"{key}=[{','.join(quote(item.strip()) for item in items.split(','))}]"])[0]
    return Problem(text, "can't be read.", f"Put quotes around special characters: {key}='\"...\"'.")


def _check_option(group: str, option: Any, options: Sequence[str]) -> Problem | None:
    if option in options or (option is None and group == "experiment"):
        return None
    return Problem(
        show(group, option),
        f"is no option of {group}: it has {', '.join(options)}.",
        _did_you_mean(group, option, options),
    )


def _did_you_mean(group: str, option: Any, options: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(option), options, n=1, cutoff=0.5)
    return f"Did you mean {group}={nearest[0]}?" if nearest else f"Set {group} to one of these."


def _unknown(key: str, value: Any) -> Problem:
    section, _, name = key.rpartition(".")
    sections = [*(field.name for field in fields(Config)), "experiment"]
    nearest = nearest_settings(key) or ([] if section else difflib.get_close_matches(key, sections, n=1, cutoff=0.7))
    if nearest:
        fix = f"Did you mean {' or '.join(nearest)}?"
    elif (section or name) in sections:
        prefix = (section or name) + "."
        fix = f"{prefix[:-1]} has: {', '.join(k.removeprefix(prefix) for k in all_settings() if k.startswith(prefix))}."
    else:
        fix = "See --help for the commonest settings, docs/configuration.md for all."
    return problem_about(key, value, "is not a setting.", fix)


def _wrong_type(key: str, value: Any) -> Problem:
    setting = all_settings()[key]
    nearest = difflib.get_close_matches(str(value).lower(), [c.lower() for c in setting.choices], n=1)
    by_lower = {choice.lower(): choice for choice in setting.choices}
    best = by_lower[nearest[0]] if nearest else setting.default
    fix = f"Set {show(key, best)}." + (_SEVERAL_DATA_SETS if key == "data.path" else "")
    return problem_about(key, value, f"must be {setting.expected}.", fix)


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
            _did_you_mean(group, option, options),
        )
    return Problem("The YAML files", f"can't be composed: {_first_line(error)}", "See the files under --config-dir.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or (str(error.__cause__) if error.__cause__ else type(error).__name__)


def quote(text: str) -> str:
    """Returns text as the value of an override, whatever characters it has."""
    return f"'{_escape(text)}'"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
