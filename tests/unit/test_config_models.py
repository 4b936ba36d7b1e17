"""The presets of conf/model against the models' published config.json, and against the models transformers builds."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.helpers import quick_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp.config.reading.command_line import conf_folder, group_options
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import Config, ModelConfig
from qlora_fsdp.config.specs import ModuleSpec
from qlora_fsdp.config.world import World
from qlora_fsdp.model.find import make_config
from qlora_fsdp.tracing.model_tracer import trace_config

PRESETS = [name for name in group_options("model", [conf_folder()]) if name not in ("custom", "tiny")]
PUBLISHED = json.loads((Path(__file__).parents[1] / "helpers" / "published_models.json").read_text())
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob"),
    *("routed_scaling_factor", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    *("top_k_experts", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "layer_types"),
)
TOP_K = ("num_experts_per_tok", "top_k_experts")  # how many experts a token is sent to, as the families name it

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
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "tiny": 869_504,
}

# Billions of parameters that the authors of mixtures of experts name (on the model's page, or in the README of its
# repository), in total and active per token. The last number is how many of the two tables of tokens, embeddings and
# head, they leave out of the second.
NAMED_BY_AUTHORS = {
    "qwen3-30b-a3b": (30.5, 3.3, 0),
    "qwen3-235b-a22b": (235, 22, 0),
    "gpt-oss-20b": (21, 3.6, 1),
    "gpt-oss-120b": (117, 5.1, 1),
    "glm-4.5-air": (106, 12, 2),
    "deepseek-v3": (671, 37, 0),
    "llama4-maverick-instruct": (400, 17, 0),
}


@cache
def settings(name: str) -> Config:
    return load_config(["data=random", "training.max_steps=1", f"model={name}"])


def preset(name: str) -> ModelConfig:
    return settings(name).model


def published(name: str) -> dict[str, Any]:
    """What is published of a preset's model. It takes no `load_config`, as each worker collects these tests."""
    return dict(PUBLISHED[yaml.safe_load((conf_folder() / "model" / f"{name}.yaml").read_text())["path"]])


@cache
def built(name: str) -> PreTrainedModel:
    """The model of a preset as transformers builds it, on the meta device."""
    config = AutoConfig.for_model(**preset(name).config)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def count_parameters(name: str) -> int:
    """As transformers builds the model; tied ones once."""
    return sum(parameter.numel() for parameter in built(name).parameters())


def count_active(name: str) -> int:
    """Parameters without those of the experts that a token is not sent to."""
    model = built(name)
    top_k: int = next(model.config.to_dict()[key] for key in TOP_K if key in preset(name).config)
    return sum(p.numel() * top_k // len(p) if ".experts." in key else p.numel() for key, p in model.named_parameters())


@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
def test_every_preset_composes_and_validates(name: str) -> None:
    """As test_config_compose.py does with the options of the other groups."""
    quick_config.check(settings(name), World())


@pytest.mark.parametrize("name", PRESETS)
def test_figures_are_the_published_ones(name: str) -> None:
    """published_models.json says for every model where its figures were read."""
    model, figures = preset(name), published(name)
    assert model.name == name and model.path in PUBLISHED
    assert figures == PUBLISHED[model.path] and figures.pop("read_in")
    assert {key: model.config.get(key) for key in figures} == figures
    assert {key for key in SIZES if key in model.config} <= set(figures)


@pytest.mark.parametrize("name", PRESETS)
def test_first_line_says_what_it_is(name: str) -> None:
    """Base or instruct, its parameters and its licence. A base model is not taken for one that chats, by its name."""
    first = (conf_folder() / "model" / f"{name}.yaml").read_text().splitlines()[0]
    counts = r"([\d,]+) parameters(?:, ([\d,]+) of them active per token)?"
    found = re.match(rf"# (Base|Instruct) model of {counts}\. [A-Z].*\.$", first)
    assert found is not None, first
    assert found[2] == f"{count_parameters(name):,}"
    is_mixture = any(key in preset(name).config for key in TOP_K)
    assert found[3] == (f"{count_active(name):,}" if is_mixture else None)
    if name.endswith(("-instruct", "-it")):
        assert found[1] == "Instruct"
    if name.endswith("-base"):
        assert found[1] == "Base"


@pytest.mark.parametrize("name", PUBLISHED_NUM_PARAMETERS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count_parameters(name) == PUBLISHED_NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", NAMED_BY_AUTHORS)
def test_mixtures_have_the_parameters_that_their_authors_name(name: str) -> None:
    """Authors round up, round down or cut: the last digit that they name may be off by one."""
    total, active, num_left_out = NAMED_BY_AUTHORS[name]
    table = preset(name).config["vocab_size"] * preset(name).config["hidden_size"]
    for counted, named in ((count_parameters(name), total), (count_active(name) - num_left_out * table, active)):
        assert abs(counted / 1e9 - named) < (1 if named == int(named) else 0.1)


ONE_OF_EACH_FAMILY = {published(name)["model_type"]: name for name in PRESETS}


@pytest.mark.parametrize("name", ["tiny", *ONE_OF_EACH_FAMILY.values()])
def test_the_plan_counts_what_transformers_builds(name: str) -> None:
    parts = trace_config(make_config(preset(name).config, name), settings(name)).parts(ModuleSpec.of(settings(name)))
    assert parts.num_parameters == count_parameters(name)


@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
def test_no_figure_is_misspelt(name: str) -> None:
    given = preset(name).config
    config = AutoConfig.for_model(**given)
    # A misspelt key would be kept by transformers, silently, beside the default of the right one. Those of some are
    # no keys of every family's own, and are read where they are given.
    known = set(type(config)().to_dict()) | set(type(config).attribute_map) | {"rope_theta", "rope_scaling"}
    of_some = {"rope_local_base_freq", "partial_rotary_factor", "head_dim", "full_attention_interval"}
    of_some |= {"global_head_dim", "num_global_key_value_heads", "hybrid_override_pattern", "num_hidden_layers"}
    assert set(given) <= known | of_some
    if "rope_parameters" in given:
        assert given["rope_parameters"].items() <= config.rope_parameters.items()
    elif hasattr(config, "rope_parameters"):  # Nemotron 3 attends without positions
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        assert rope["rope_theta"] == given["rope_theta"]
        assert rope["rope_type"] == given.get("rope_scaling", {}).get("rope_type", "default")
