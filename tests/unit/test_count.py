"""What a run computes and holds, compared with torch's own counter and transformers' own numbers."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.config.schema import LoraConfig, QuantConfig
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.count import count_bytes, count_flops
from qlora_fsdp.model.find import ModelFiles

TOKENS = 24
NUM_EXPERTS = 4  # of every family
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def config_of(family: str) -> AutoConfig:
    return AutoConfig.for_model(family, **{**SHAPE, **OTHER_FAMILIES[family]})


def linear_flops(model: nn.Module) -> float:
    """What torch counts for TOKENS tokens without attention's products, which are quadratic in the length.

    If c(n) = a n + b n^2, then a n = 2 c(n) - c(2 n) / 2.
    """
    counts = []
    for length in (TOKENS, 2 * TOKENS):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(length)[None], use_cache=False)
        counts.append(counter.get_total_flops())
    return float(2 * counts[0] - counts[1] / 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_count_by_the_share_that_a_token_meets(family: str):
    """torch counts the products of stock experts, one after another, for the tokens that each of them gets."""
    config = config_of(family)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    linear = linear_flops(stock)
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


def test_a_head_that_is_trained_in_full_counts_once():
    """torch counts the products of stock PEFT's model: with the same head, frozen or trained, they are as many."""
    config = AutoConfig.for_model("llama", **SHAPE)
    counts = []
    for modules_to_save in (None, ["lm_head"]):
        built = build_model(ModelFiles(None, config), BuildSettings(QuantConfig(), torch.float32, "eager"))
        settings = LoraConfig(r=4, modules_to_save=modules_to_save)
        found = count_flops(apply_adapters(built.model, settings), config)
        stock = peft.get_peft_model(
            AutoModelForCausalLM.from_config(config, attn_implementation="eager"),
            peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=modules_to_save, task_type="CAUSAL_LM"),
        )
        counts.append(found)
        assert 2 * (found.frozen_weights + found.trained_weights) * TOKENS == pytest.approx(
            linear_flops(stock), rel=0.002
        )
    head = config.vocab_size * config.hidden_size
    assert counts[1] == replace(
        counts[0],
        frozen_weights=counts[0].frozen_weights - head,
        trained_weights=counts[0].trained_weights + head,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_is_that_of_transformers(family: str):
    config = config_of(family)
    stock = AutoModelForCausalLM.from_config(config)
    built = build_model(ModelFiles(None, config), BuildSettings(QuantConfig(), torch.float32, "eager"))
    assert count_bytes(apply_adapters(built.model, LoraConfig(r=4)), 0, 1).num_base == stock.num_parameters()
