"""Which figures count for a model: those of a preset, or those of a config.json. Imports no torch.

A preset (conf/model/NAME.yaml) names a model, `model.path`, and states the figures of its config.json in
`model.config`, so that the model can be planned and tried without a download. Where `model.path` leads to a config.json
of its own, that one counts, and a preset that states other figures is refused: two models are never mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.common.errors import CheckpointError, ConfigError
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.reading.command_line import conf_folder, group_options
from qlora_fsdp.config.schema import ModelConfig, Weights
from qlora_fsdp.config.settings import problem_about

# What makes two configs those of two models. The other keys, such as the ids of special tokens, differ between
# finetunes of one model.
FIGURES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
# What JSON has no number for is an object in transformers' files: {"__float__": "Infinity"}.
FLOAT_TAG, FLOATS = "__float__", ("NaN", "Infinity", "-Infinity")
MAX_SHOWN = 3  # figures in a message
MAX_WIDTH = 40  # letters of one of them


def describes_itself(model: ModelConfig) -> bool:
    """Whether `model.config` is the whole config of the model, so that no config.json has to be had.

    That of a preset is, unless `model.path` was set to something else: the preset does not know what that is. That of
    `model=custom` is only for random weights.
    """
    if "model_type" not in model.config:
        return False
    if model.name == "custom":
        return model.path is None or model.weights is Weights.random
    return model.path == _preset_path(model)


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a transformers config that describes the text decoder: all of it, unless it is multimodal."""
    text = values.get("text_config")
    return text if isinstance(text, Mapping) and text else values


def check_same_model(model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Refuses a preset that states other figures than the config that was found under `model.path`.

    Args:
        model: the settings. Those of `model=custom` state no figures: its `model.config` overrides what is found.
        found: the model's transformers config, as a dict.

    Raises:
        ConfigError: the preset and `model.path` are two models. The message has the first figures that differ.
    """
    if model.name == "custom":
        return
    found = _text_part(found)
    stated = {key: model.config[key] for key in FIGURES if key in model.config and found.get(key) is not None}
    differing = [
        f"{key} is {shorten(str(found[key]), MAX_WIDTH)} and not {value}"
        for key, value in stated.items()
        if found[key] != value
    ]
    if differing:
        more = f", and {len(differing) - MAX_SHOWN} more figures" if len(differing) > MAX_SHOWN else ""
        reason = f"is another model than model={model.name}: {', '.join(differing[:MAX_SHOWN])}{more}."
        fix = f"Leave model={model.name} out, and the path's own config.json counts; or leave model.path out."
        raise ConfigError([problem_about("model.path", model.path, reason, fix)])


def read_config_json(file: Path, model: ModelConfig) -> dict[str, Any]:
    """Reads a model's config.json, and checks or overrides it with `model.config`.

    Raises:
        CheckpointError: it can't be read, or is no transformers config.
        ConfigError: as `check_same_model`.
    """
    try:
        values = {key: _with_floats(value) for key, value in read_json_object(file, MAX_CONFIG_BYTES).items()}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}). Copy or download it again.") from error
    check_same_model(model, values)
    if model.name == "custom" and model.weights is Weights.random:
        text = _text_part(values)
        values = values | {"text_config": {**text, **model.config}} if text is not values else values | model.config
    return values


def _with_floats(value: Any) -> Any:
    """A value of a config.json with the numbers that objects of one tag stand for, as transformers reads it."""
    if isinstance(value, dict):
        tagged = value.get(FLOAT_TAG) if len(value) == 1 else None
        return float(tagged) if tagged in FLOATS else {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _preset_path(model: ModelConfig) -> str | None:
    """The `model.path` that the preset itself has; that of the settings if they are of no preset of conf/."""
    if model.name not in group_options("model", [conf_folder()]):
        return model.path
    preset = yaml.safe_load((conf_folder() / "model" / f"{model.name}.yaml").read_text(encoding="utf-8"))
    path: str | None = preset.get("path")
    return path
