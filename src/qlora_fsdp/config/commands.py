"""The command lines of the commands beside training: own settings, then the run's settings as for training.

    python -m qlora_fsdp.generate adapter=DIR prompt="..." max_new_tokens=64 model.attn_implementation=eager

An adapter's folder has the settings of model, quantization and task that it was trained with (`SETTINGS_FILE`), which
come first; what is typed wins. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.command_line import conf_folder
from qlora_fsdp.config.compose import load_config
from qlora_fsdp.config.schema import Config, TaskName
from qlora_fsdp.config.settings import show

SETTINGS_FILE = "qlora_fsdp.yaml"
SAVED_SECTIONS = ("model", "tokenizer", "quant", "task")

# Settings that training needs and these commands do not, so that its checks have nothing to say about them.
WITHOUT_TRAINING = ("training.max_steps=1",)


@dataclass
class AdapterSettings:
    """Settings of every command that takes an adapter.

    Attributes:
        adapter: folder of an adapter; None: the base model alone.
    """

    adapter: str | None = None


Settings = TypeVar("Settings", bound=AdapterSettings)


def load_command(argv: Sequence[str], kind: type[Settings], usage: str) -> tuple[Settings, Config]:
    """Reads the command line of a command.

    Args:
        argv: own settings and the run's, in any order.
        kind: a dataclass of the own settings.
        usage: what --help prints.

    Raises:
        ConfigError: unknown keys, wrong types, or a folder that holds no adapter.
    """
    if "--help" in argv or "-h" in argv:
        if os.environ.get("RANK", "0") == "0":
            print(usage.strip())
        raise SystemExit(0)
    values, rest, problems = _split(argv, kind)
    settings = kind(**values)
    groups = {text.lstrip("+").partition("=")[0] for text in rest}
    if settings.adapter is not None:
        problems += _adapter_problems(settings.adapter)
        if "experiment" in groups:
            reason = "can't be used with adapter=, whose saved settings are in its place."
            problems.append(Problem("experiment", reason, "Type the settings that are to be others."))
    if problems:
        raise ConfigError(problems)
    saved = None if settings.adapter is None else Path(settings.adapter).expanduser() / SETTINGS_FILE
    with TemporaryDirectory() as folder:
        first = list(WITHOUT_TRAINING)
        if saved is not None and saved.is_file():
            experiment = Path(folder) / "experiment" / "adapter.yaml"
            experiment.parent.mkdir()
            experiment.write_text(f"# @package _global_\n{_read_saved(saved, groups)}", encoding="utf-8")
            first = ["--config-dir", folder, "experiment=adapter", *first]
        elif settings.adapter is not None and "model" not in groups:
            first = [f"model.path={_base_model(settings.adapter)}", *first]
        return settings, load_config([*first, *rest])


def saved_settings(config: Config, class_weights: list[float] | None = None) -> str:
    """The text of SETTINGS_FILE: what is needed to build the model that an adapter belongs to, and to evaluate it.

    Args:
        config: of the run.
        class_weights: of a classifier's labels, as numbers.
    """
    values: dict[str, Any] = {}
    for section in SAVED_SECTIONS:
        values[section] = OmegaConf.structured(getattr(config, section))
    path = config.model.path
    if path is not None and Path(path).expanduser().is_dir():
        values["model"].path = str(Path(path).expanduser().resolve())
    if not config.training.packing:  # always of a classifier; else the model may not be one whose rows are packed
        values["training"] = {"packing": False}
    if config.task.name is not TaskName.causal_lm:
        values["task"].class_weights = class_weights
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _read_saved(file: Path, typed: set[str]) -> str:
    """The text of SETTINGS_FILE without what is typed as a whole, `quant=int8` say: as an experiment, it would win.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        saved = OmegaConf.load(file)
        kept = {section: value for section, value in saved.items() if section not in typed}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        reason = f"can't be read: {' '.join(str(error).split())}."
        raise ConfigError([Problem(str(file), reason, "Copy the adapter again, or remove this file.")]) from None
    if "task" in typed:
        kept.pop("training", None)  # packing, which goes with the task
    return OmegaConf.to_yaml(OmegaConf.create(kept))


def _split(argv: Sequence[str], kind: type) -> tuple[dict[str, Any], list[str], list[Problem]]:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    groups = {path.name for path in conf_folder().iterdir() if path.is_dir()}  # task=... is not tasks=... misspelt
    values: dict[str, Any] = {}
    rest, problems = [], []
    for text in argv:
        key, equals, value = text.partition("=")
        may_be_misspelt = equals and key.isidentifier() and key not in groups
        if key in names and equals:
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                problems.append(Problem(text, f"must be {error}.", f"Set {key} to that, or leave it out."))
        elif near := difflib.get_close_matches(key, names, n=1) if may_be_misspelt else []:
            problems.append(Problem(text, "is not a setting.", f"Did you mean {near[0]}?"))
        else:
            rest.append(text)
    return values, rest, problems


def _convert(text: str, hint: Any) -> Any:
    if get_origin(hint) is UnionType:
        if text in ("null", "none"):
            return None
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("true or false")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    return text


def _adapter_problems(adapter: str) -> list[Problem]:
    folder = Path(adapter).expanduser()
    missing = [n for n in ("adapter_config.json", "adapter_model.safetensors") if not (folder / n).is_file()]
    if not missing:
        return []
    inside = next((sub for sub in ("adapter",) if (folder / sub / "adapter_config.json").is_file()), None)
    fix = (
        f"Set adapter={adapter}/{inside}." if inside else "Set adapter to the folder that training wrote, run/adapter."
    )
    return [Problem(show("adapter", adapter), f"holds no adapter: no {' and no '.join(missing)}.", fix)]


def _base_model(adapter: str) -> str:
    try:
        saved = json.loads((Path(adapter).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        base = saved["base_model_name_or_path"]
        return "null" if base is None else str(base)
    except (ValueError, KeyError) as error:
        reason = f"has an adapter_config.json that can't be read: {error!r}."
        raise ConfigError([Problem(show("adapter", adapter), reason, "Copy or download it again.")]) from None
