"""The models' configs against the parameter counts that their publishers name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.config.command_line import conf_folder, group_options
from qlora_fsdp.config.compose import load_config

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


def test_every_model_has_a_count() -> None:
    assert set(PUBLISHED_NUM_PARAMETERS) == set(group_options("model", [conf_folder()])) - {"custom"}


@pytest.mark.parametrize("model", PUBLISHED_NUM_PARAMETERS)
def test_config_builds_the_published_model(model: str) -> None:
    given = load_config([f"model={model}"]).model.config
    config = AutoConfig.for_model(**given)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == PUBLISHED_NUM_PARAMETERS[model]

    # A misspelt key would be kept by transformers, silently, beside the default of the right one.
    known = set(type(config)().to_dict()) | {"rope_theta", "rope_scaling", "rope_local_base_freq"}
    assert set(given) <= known
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert rope["rope_theta"] == given["rope_theta"]
    assert rope["rope_type"] == given.get("rope_scaling", {}).get("rope_type", "default")
