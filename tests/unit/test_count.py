"""What a run computes and holds, compared with torch's own counter and transformers' own numbers."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.config.schema import LoraConfig, QuantConfig
from qlora_fsdp.model.adapters import apply_adapters
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.count import count_bytes, count_flops
from qlora_fsdp.model.find import ModelFiles

TOKENS = 24
NUM_EXPERTS = 4  # of every family
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def config_of(family: str) -> AutoConfig:
    return AutoConfig.for_model(family, **{**SHAPE, **OTHER_FAMILIES[family]})


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_count_by_the_share_that_a_token_meets(family: str):
    """torch counts the products of stock experts, one after another, for the tokens that each of them gets."""
    config = config_of(family)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    counts = []
    for length in (TOKENS, 2 * TOKENS):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            stock(input_ids=torch.arange(length)[None], use_cache=False)
        counts.append(counter.get_total_flops())
    # Attention's products are quadratic in the length: c(n) = a n + b n^2, and 2 c(n) - c(2 n) / 2 = a n.
    linear = 2 * counts[0] - counts[1] / 2
    built = build_model(ModelFiles(None, config), BuildSettings(QuantConfig(), torch.float32, "eager"))
    flops = count_flops(built.model, config)
    assert 2 * flops.frozen_weights * TOKENS == pytest.approx(linear, rel=0.002)  # and rotary embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_experts_count_by_their_share_too(family: str):
    config = config_of(family)
    built = build_model(ModelFiles(None, config), BuildSettings(QuantConfig(), torch.float32, "eager"))
    frozen = count_flops(built.model, config).frozen_weights
    model = apply_adapters(built.model, LoraConfig(r=4))
    found = count_flops(model, config)
    assert found.frozen_weights == frozen
    expected = 0.0
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            is_expert = ".experts." in name
            share = built.model.config.num_experts_per_tok / NUM_EXPERTS if is_expert else 1
            expected += share * parameter.numel()
    assert found.trained_weights == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_is_that_of_transformers(family: str):
    config = config_of(family)
    stock = AutoModelForCausalLM.from_config(config)
    built = build_model(ModelFiles(None, config), BuildSettings(QuantConfig(), torch.float32, "eager"))
    assert count_bytes(apply_adapters(built.model, LoraConfig(r=4)), 0, 1).num_base == stock.num_parameters()
