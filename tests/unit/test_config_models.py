"""The presets of conf/model against the models' published config.json, and against the models transformers builds."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.config.command_line import conf_folder, group_options
from qlora_fsdp.config.compose import load_config
from qlora_fsdp.config.schema import ModelConfig
from qlora_fsdp.model.find import make_config
from qlora_fsdp.tracing.model_tracer import trace_config

PRESETS = [name for name in group_options("model", [conf_folder()]) if name not in ("custom", "tiny")]
PUBLISHED = json.loads((Path(__file__).parents[1] / "helpers" / "published_models.json").read_text())
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
)

# Counts of the safetensors files on the Hugging Face hub; gemma3-27b without the image encoder and its projector.
PUBLISHED_NUM_PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma3-27b": 27_009_346_304,
    "phi4": 14_659_507_200,
    "tiny": 869_504,
}


@cache
def preset(name: str) -> ModelConfig:
    return load_config([f"model={name}"]).model


@cache
def num_parameters(name: str) -> int:
    """As the plan counts them."""
    settings = load_config([f"model={name}"])
    return trace_config(make_config(settings.model.config, name), settings).parts(settings).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_the_published_ones(name: str) -> None:
    """published_models.json says for every model where its figures were read."""
    model = preset(name)
    assert model.name == name and model.path is not None
    published = dict(PUBLISHED[model.path])
    assert published.pop("read_in")
    assert {key: model.config.get(key) for key in published} == published
    assert {key for key in SIZES if key in model.config} <= set(published)


@pytest.mark.parametrize("name", PRESETS)
def test_first_line_says_what_it_is(name: str) -> None:
    """Base or instruct, its parameters and its licence. A base model is not taken for one that chats, by its name."""
    first = (conf_folder() / "model" / f"{name}.yaml").read_text().splitlines()[0]
    found = re.match(r"# (Base|Instruct) model of ([\d,]+) parameters\. [A-Z].*\.$", first)
    assert found is not None, first
    assert int(found[2].replace(",", "")) == num_parameters(name)
    if name.endswith(("-instruct", "-it")):
        assert found[1] == "Instruct"
    if name.endswith("-base"):
        assert found[1] == "Base"


@pytest.mark.parametrize("name", PUBLISHED_NUM_PARAMETERS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert num_parameters(name) == PUBLISHED_NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
def test_transformers_builds_the_counted_model(name: str) -> None:
    given = preset(name).config
    config = AutoConfig.for_model(**given)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == num_parameters(name)

    # A misspelt key would be kept by transformers, silently, beside the default of the right one.
    known = set(type(config)().to_dict()) | {"rope_theta", "rope_scaling", "rope_local_base_freq"}
    assert set(given) - {"partial_rotary_factor"} <= known
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert rope["rope_theta"] == given["rope_theta"]
    assert rope["rope_type"] == given.get("rope_scaling", {}).get("rope_type", "default")
