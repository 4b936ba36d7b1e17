"""Makes a typed `Config` of the command line and the YAML files.

Hydra composes plain values: the schema's defaults, then one option of each group, then an experiment, then what a file
of `--config` or an adapter's folder says, then the overrides. Only the result is checked against the schema, in one
walk. This finds a key that the schema does not know wherever it comes from (a user's YAML file, `key=`, `+key=` or
`++key=`), and reports all such mistakes at once. Hydra itself would stop at the first mistake, and would accept any key
after a plus sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from qlora_fsdp.common.errors import ConfigError, Problem, refuse
from qlora_fsdp.common.startup import is_first_rank
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.adapter.lora_start import (
    FindStart,
    find_contradictions,
    read_start,
    settle_targets,
    start_problems,
    typed_folder,
)
from qlora_fsdp.config.checks.check_settings import check_settings, check_typed
from qlora_fsdp.config.reading.command_line import Arguments, help_text, parse_arguments
from qlora_fsdp.config.reading.config_file import FileSettings, leave_out, read_config_file
from qlora_fsdp.config.reading.overrides import Overrides, chosen_groups, quote, read_overrides
from qlora_fsdp.config.recorded import find_unresolvable, note_written, plain_settings, sections_of
from qlora_fsdp.config.schema import Config, DataFormat, Dtype
from qlora_fsdp.config.settings import (
    Sections,
    all_settings,
    changed_by_reading,
    is_passed_over,
    unknown_setting,
    values_of,
    wrong_type,
)

# Hydra reads the folders of --config-dir by src/hydra_plugins/qlora_fsdp_folders.py, which checks their files.
FOLDER_SCHEME = "settings://"


def load_config(
    argv: Sequence[str],
    check: Callable[[Config], list[Problem]] = check_settings,
    beneath: Sequence[Sections] = (),
    launches: bool = False,
    find_start: FindStart = typed_folder,
) -> Config:
    """Reads the command line and composes the configuration.

    `--help` and `--cfg job` print, on rank 0, and exit.

    Args:
        argv: the arguments after the program's name, e.g. `["model=llama3-8b", "lora.r=32"]`.
        check: finds what else is wrong with a configuration. It is called where the command line has mistakes, so that
            the user sees both at once.
        beneath: values by section and name that what is typed and the file of `--config` win over; later ones win over
            earlier ones.
        launches: whether this process starts ranks, so that settings of `launch` have an effect.
        find_start: says where the adapter that `lora.start` names is to be read.

    Returns:
        The configuration, typed and with all interpolations resolved. It is well formed but not yet checked.

    Raises:
        ConfigError: unknown keys or options, wrong types, unreadable overrides or YAML: all that were found.
    """
    arguments = parse_arguments(argv)
    if arguments.help:
        print_and_exit(help_text(arguments.folders))

    config, unusable, mistakes = read_arguments(arguments, find_start, beneath)
    unusable += _without_effect(arguments, launches)
    mistakes += check_typed(chosen_groups(arguments.overrides), values_of(config))
    if unusable:
        raise ConfigError([*unusable, *mistakes])
    if mistakes:
        # The rest is checked too, without the defaults that stand in for the mistaken values.
        mistaken = {problem.setting for problem in mistakes}
        if "lora.start" in mistaken and config.model.path is None:
            mistaken.add("model.path")  # the adapter would have named its base
        others = [problem for problem in check(config) if problem.setting not in mistaken]
        raise ConfigError([*mistakes, *others])
    if arguments.cfg:
        print_and_exit(to_yaml(config))
    return config


def to_yaml(config: Config, as_written: bool = False) -> str:
    """Returns the configuration as YAML, which `--config` reads.

    Args:
        config: the configuration.
        as_written: for the files of a run: with every `${...}` as it was written, and without `launch` and `slurm`,
            which say how a run is started and not what it is.
    """
    if not as_written:
        return OmegaConf.to_yaml(OmegaConf.structured(config))
    settings = {key: config.written.get(key, value) for key, value in plain_settings(config).items()}
    return OmegaConf.to_yaml(OmegaConf.create(sections_of(settings)))


def read_given(arguments: Arguments, beneath: Sequence[Sections] = ()) -> FileSettings:
    """Returns what the file of `--config` and `beneath` say, without what is typed in its place.

    Raises:
        ConfigError: the file can't be used.
    """
    typed = chosen_groups(arguments.overrides)
    file = FileSettings()
    if arguments.config_file is not None:
        file = read_config_file(arguments.config_file, arguments.folders)
        if "experiment" in typed:
            reason = f"can't be used with --config {arguments.config_file}: both say what a run begins with."
            fix = "Write `experiment: NAME` into that file, whose own values win over it."
            raise ConfigError([Problem("experiment", reason, fix)])
    options = tuple(text for text in file.options if text.partition("=")[0] not in typed)
    chosen = typed | chosen_groups(options)
    layers = [leave_out(layer, chosen, arguments.folders) for layer in beneath]
    layers.append(leave_out(file.values, typed, arguments.folders))
    values: Sections = {}
    for layer in layers:
        for section, names in layer.items():
            values.setdefault(section, {}).update(names)
    return FileSettings(options, values)


def read_arguments(
    arguments: Arguments, find_start: FindStart, beneath: Sequence[Sections] = ()
) -> tuple[Config, list[Problem], list[Problem]]:
    """Composes a command line's settings and checks them as `read_config` does, and against `lora.start`'s adapter.

    With `lora.start` they are composed twice: what the adapter's settings change then is what nobody has written.

    Returns:
        The typed configuration, the problems with words that can't be used, and those with values.

    Raises:
        ConfigError, AdapterError: an interpolation can't be resolved, or an adapter can't be read.
    """
    given = read_given(arguments, beneath)
    typed = read_overrides([*given.options, *arguments.overrides], arguments.folders)
    compose_all = partial(_compose, typed, arguments.folders, given.values)
    config, mistakes = read_config(compose_all({}))
    config.replaced = typed.replaced
    if config.lora.start is None:
        return config, typed.problems, mistakes
    folder = find_start(config.lora.start, config.run, config.checkpoint)
    problems = start_problems(config.lora.start, folder)
    if problems:
        return config, typed.problems, [*mistakes, *problems]
    start = read_start(folder)
    config, mistakes = read_config(compose_all(start.defaults(config.model)))
    config.replaced = typed.replaced
    mistaken = {problem.setting for problem in mistakes}
    contradictions = find_contradictions(config.lora, config.model, config.quant, config.task, start)
    problems = [problem for problem in contradictions if problem.setting not in mistaken]
    settle_targets(config.lora, start)
    return config, typed.problems, [*mistakes, *problems]


def read_config(composed: DictConfig) -> tuple[Config, list[Problem]]:
    """Checks composed plain values against the schema.

    Args:
        composed: what Hydra made of YAML and overrides, by section and name.

    Returns:
        The typed configuration, with the default wherever a value can't be used, and a problem for each of those.

    Raises:
        ConfigError: an interpolation can't be resolved.
    """
    written = _as_dict(composed, resolve=False)
    refuse(find_unresolvable(written))
    try:
        values = _as_dict(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([explain_interpolation(error)]) from None

    typed = deepcopy(typed_defaults())
    problems: list[Problem] = []
    for section, section_values in values.items():
        if not isinstance(section_values, dict):
            problems.append(unknown_setting(section, section_values))
            continue
        for name, value in section_values.items():
            key = f"{section}.{name}"
            if is_passed_over(key, value):
                continue
            if key not in all_settings():
                problems.append(unknown_setting(key, value))
                continue
            own = written[section]  # a text, where the whole section is ${...}
            changed = changed_by_reading(key, value, own[name] if isinstance(own, dict) else value)
            if changed is not None:
                problems.append(changed)
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
    if config.data.is_default and (config.data.mix or config.data.format is DataFormat.random):
        config.data.path = None  # these say what to train on
    note_written(config, written)
    return config, problems


def print_and_exit(text: str) -> NoReturn:
    """Prints what a command shows in place of its work, on rank 0, and ends."""
    if is_first_rank():
        print(text.rstrip())
    raise SystemExit(0)


def _compose(typed: Overrides, folders: Sequence[Path], given: Sections, stand_ins: Sections) -> DictConfig:
    """The plain values: what Hydra composes of files, with what is typed."""
    composed = _compose_files(typed.options, folders, given, stand_ins)
    OmegaConf.set_struct(composed, False)
    composed.merge_with(typed.values)
    return composed


def _compose_files(options: Sequence[str], folders: Sequence[Path], given: Sections, stand_ins: Sections) -> DictConfig:
    with composing(folders, given, stand_ins) as search_path:
        return compose("config", overrides=[*options, search_path])


def _without_effect(arguments: Arguments, launches: bool) -> list[Problem]:
    """Refuses settings of the launch for a run that this process does itself."""
    if arguments.starts_jobs:
        return []
    of_clusters = ("slurm", "skypilot", "kubernetes")
    fixes = {name: f"Leave it out: it is for `qlora-fsdp train` with hydra/launcher={name}." for name in of_clusters}
    if not launches:
        commands = "train, evaluate, generate, predict, score, chat and doctor"
        fixes["launch"] = f"Leave it out: only `qlora-fsdp` {commands} start processes."
    problems = []
    for text in arguments.overrides:
        section, dot, _ = text.lstrip("+").partition(".")
        if dot and section in fixes:
            problems.append(Problem(text, "has no effect here: nothing is launched.", fixes[section]))
    return problems


def _as_dict(composed: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def register_schema(given: Any = None, stand_ins: Sections | None = None) -> None:
    """Gives Hydra what conf/config.yaml names besides files.

    Args:
        given: values that win over those of all files, by section and name.
        stand_ins: values in the place of the schema's defaults: those of an adapter (`lora.start`).
    """
    instead = stand_ins or {}
    defaults = {section: {**names, **instead.get(section, {})} for section, names in _defaults().items()}
    ConfigStore.instance().store("schema", node=defaults)
    ConfigStore.instance().store("given", node=given or {})


@cache
def _defaults() -> Any:
    return OmegaConf.to_container(typed_defaults(), enum_to_str=True)


@cache
def typed_defaults() -> DictConfig:
    """The schema with its defaults, to be copied: a copy takes a fifth of the time that it takes to make it anew."""
    return OmegaConf.structured(Config)  # type: ignore[no-any-return]


@contextmanager
def composing(folders: Sequence[Path], given: Any, stand_ins: Sections | None = None) -> Iterator[str]:
    """Wraps what Hydra does with conf/config.yaml, and gives the override that makes it look into all `folders`.

    A sweep composes its jobs inside of it.

    Args:
        folders: where groups of options are, first the project's own.
        given: as `register_schema` takes it.
        stand_ins: as `register_schema` takes it.

    Raises:
        ConfigError: Hydra stopped; the message is Hydra's.
    """
    register_schema(given, stand_ins)
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    extra = ",".join(quote(f"{FOLDER_SCHEME}{folder}") for folder in folders[1:])
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="train"):
            yield f"hydra.searchpath=[{extra}]"
    except InterpolationResolutionError as error:
        raise ConfigError([explain_interpolation(error)]) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_explain(error)]) from None
    finally:
        GlobalHydra.instance().hydra = outer


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
