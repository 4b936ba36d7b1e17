"""Sizes that differ between a model's layers, and attention of heads that are too wide for flash kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import GEMMA4, OTHER_FAMILIES, PER_LAYER, SHAPE
from tests.helpers.quick_config import load_config
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from qlora_fsdp.common.model_figures import HeadSizes, head_sizes, values_by_layer
from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.layers.attention import choose as attention
from qlora_fsdp.layers.attention import wide
from qlora_fsdp.layers.kernels import triton_softmax
from qlora_fsdp.layers.kernels.launch import times
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.tracing.model_tracer import trace_config

WIDE = GEMMA4 | {"global_head_dim": 512}


def config_of(family: str, **more: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**SHAPE, **OTHER_FAMILIES.get(family, {}), **more})


def test_heads_are_those_that_the_layers_are_built_with():
    """Weights of stock models on meta have the shapes that are counted."""
    for family in ("llama", "gemma4_text", "gemma4_unified_text", "qwen3_moe"):
        config = config_of(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found = head_sizes(config)
        assert len(found) == len(model.model.layers)
        for heads, layer in zip(found, model.model.layers, strict=True):
            assert layer.self_attn.q_proj.out_features == heads.num_heads * heads.key_size
            keys = getattr(layer.self_attn, "k_proj", None)  # later layers of Gemma 4 take keys from earlier ones
            assert keys is None or keys.out_features == heads.num_key_heads * heads.key_size


def test_latent_attention_has_values_narrower_than_keys():
    (heads, _) = head_sizes(config_of("deepseek_v3"))
    assert heads == HeadSizes(num_heads=4, num_key_heads=4, key_size=16 + 8, value_size=16)


def test_a_list_has_a_value_for_each_layer():
    config = config_of("gemma3n_text", intermediate_size=[128, 256])
    assert values_by_layer(config, "no_such_size", "intermediate_size") == (128, 256)
    assert values_by_layer(config, "no_such_size") == (None, None)


def test_a_model_of_unlike_layers_has_a_plan_that_names_the_wide_ones():
    """The last two layers take keys and values from the first two, which hand them on in a table."""
    config = load_config(["data=random", "training.max_length=64", "quant=nf4"])
    tracer = trace_config(config_of("gemma4_text", **WIDE, **PER_LAYER), config)
    assert tracer.computing.attention == attention.VARLEN
    modules = ModuleSpec.of(config)
    batch = BatchSpec.of(config, 2)
    (note,) = (note for note in tracer.notes(modules) if "heads of 512" in note)
    assert "2 of 4 layers" in note and "matrix products" in note
    kinds = range(len(tracer.parts(modules).kinds))
    for policy in (Policy.none, Policy.full):
        assert all(tracer.layer_use(modules, batch, kind, policy).saved > 0 for kind in kinds)


@pytest.mark.parametrize("lengths", [None, [12, 12], [5, 7, 1, 11]])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("uses_kernels", "num_key_heads"), [(False, 2), (True, 2), (True, 4)])
def test_wide_heads_keep_packed_rows_apart(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int] | None,
    window: int | None,
    uses_kernels: bool,
    num_key_heads: int,
):
    """Through the function that models call; heads in groups or not, and gradients. Triton interprets the kernels."""
    monkeypatch.setattr(wide, "has_kernels", lambda tensor: uses_kernels)
    monkeypatch.setattr(triton_softmax, "_BLOCK", 8)
    monkeypatch.setattr(wide, "_MIN_CHUNK", 4)
    monkeypatch.setattr(wide, "_LOGIT_BYTES", 0)  # so that a row lies in several chunks
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 264, requires_grad=True) for heads in (4, num_key_heads, num_key_heads))
    row = torch.arange(2).repeat_interleave(12)
    rows: dict[str, Any] = {}
    if lengths is not None:
        row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        rows = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}
    out, _ = attention.flash_attention_4(nn.Module(), q, k, v, None, scaling=0.1, sliding_window=window, **rows)
    ago = torch.arange(12)[:, None] - torch.arange(12)
    sees = (row.view(2, 12)[:, :, None] == row.view(2, 12)[:, None, :]) & (ago >= 0) & (ago < (window or 12))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=sees[:, None], scale=0.1, enable_gqa=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((wanted.transpose(1, 2) * weight).sum(), (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_chunk_of_wide_heads_stands_for_all_where_a_run_is_planned():
    """A plan of long rows would take minutes otherwise. 4 chunks of 1,024 queries meet 10 times 1,024 keys."""
    found = []
    for row, chunk in wide._chunks(torch.empty(2, 8, 4096, 512, device="meta")):
        found.append((row, chunk, times()))
    assert found == [(1, slice(3072, 4096), 5)], "2 sequences, each of 2.5 chunks with all of its 4,096 keys"
