"""Attention with sinks by torch's varlen kernels, whose place plain torch takes, against transformers' own gpt-oss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.packed import real_config
from tests.helpers.plain_varlen import register_plain_varlen
from tests.helpers.quick_config import load_config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import AttentionInterface, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from qlora_fsdp.config.specs import BatchSpec, ModuleSpec
from qlora_fsdp.layers.attention import choose as attention
from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention import varlen
from qlora_fsdp.layers.attention.choose import VARLEN, varlen_attention
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model.find import make_config
from qlora_fsdp.model.trials.row_trial import RowTrial
from qlora_fsdp.tracing.model_tracer import trace_config

HEADS, KEY_HEADS, SIZE, LENGTH = 8, 2, 16, 24
PACKS = [[10, 14, 1, 7, 16], [24, 24], None]  # rows in two sequences of 24 tokens; None: a sequence is a row
SINKS = torch.linspace(-3, 3, HEADS)  # of almost no weight, and of nearly all


def random_inputs() -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values and sinks, all trained, and a gradient of the output."""
    torch.manual_seed(0)
    inputs = [2 * torch.randn(2, heads, LENGTH, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [*(tensor.requires_grad_() for tensor in inputs), SINKS.clone().requires_grad_()], torch.randn(
        2, LENGTH, HEADS, SIZE
    )


def markers(lengths: list[int] | None) -> dict[str, Any]:
    if lengths is None:
        return {}
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}


def stock(inputs: list[Tensor], lengths: list[int] | None, window: int | None, scale: float) -> Tensor:
    """What transformers computes with a mask that says which tokens of the same row come before."""
    query, key, value, sinks = inputs
    row = torch.arange(2).repeat_interleave(LENGTH)
    if lengths is not None:
        row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row, tokens = row.view(2, LENGTH), torch.arange(LENGTH)
    ago = tokens[:, None] - tokens
    sees = (row[:, :, None] == row[:, None, :]) & (ago >= 0) & (ago < (window or LENGTH))
    mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[:, None]
    layer = SimpleNamespace(sinks=sinks, num_key_value_groups=HEADS // KEY_HEADS, training=True)
    return eager_attention_forward(layer, query, key, value, mask, scaling=scale)[0]


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", [varlen_attention, attention.flash_attention_4])
def test_output_and_all_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, lengths: list[int] | None, window: int | None
):
    """FlashAttention-4 is not installed here: its name too must take sinks to torch's kernel."""
    register_plain_varlen()
    monkeypatch.setattr(flash_4, "MIN_MEAN_ROW", 0)
    inputs, grad = random_inputs()
    out, _ = kernel(
        nn.Module(), *inputs[:3], None, scaling=0.2, sliding_window=window, s_aux=inputs[3], **markers(lengths)
    )
    wanted = stock(inputs, lengths, window, scale=0.2)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, inputs, grad)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, inputs, grad), strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_without_sinks_the_kernel_is_called_as_it_is():
    """The stand-in, and so what the other tests prove, is right for the kernel that torch has."""
    register_plain_varlen()
    (query, key, value, _), grad = random_inputs()
    without = torch.full((HEADS,), -100.0)
    out, _ = varlen_attention(nn.Module(), query, key, value, None, scaling=0.2, sliding_window=5)
    wanted = stock([query, key, value, without], None, window=5, scale=0.2)
    for ours, theirs in zip(
        [out, *torch.autograd.grad(out, (query, key, value), grad)],
        [wanted, *torch.autograd.grad(wanted, (query, key, value), grad)],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_keeps_its_inputs_its_output_and_a_number_for_each_query_and_head():
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 1000
    options = {"dtype": torch.bfloat16, "device": "meta"}
    q, k, v = (torch.empty(tokens, heads, 64, **options, requires_grad=True) for heads in (64, 8, 8))
    sinks, starts = torch.empty(64, **options), torch.empty(3, dtype=torch.int32, device="meta")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = varlen.attend(q, k, v, varlen.PackedRows(starts, 600), None, sinks)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert sum(kept.values()) == tokens * (2 * (64 + 8 + 8 + 64) * 64 + 4 * 64)
    assert [grad.shape for grad in torch.autograd.grad(out.sum(), (q, k, v))] == [t.shape for t in (q, k, v)]


def test_the_plan_of_gpt_oss_is_linear_in_length():
    """In both kinds of layers, with windows and without."""
    uses = []
    for length in (1024, 2048):
        config = load_config(["model=gpt-oss-20b", f"training.max_length={length}"])
        model = trace_config(make_config(config.model.config, "gpt-oss-20b"), config)
        modules, batch = ModuleSpec.of(config), BatchSpec.of(config, 2)
        uses.append([model.layer_use(modules, batch, layer, Policy.none) for layer in (0, 1)])
    for short, long in zip(*uses, strict=True):
        assert long.saved == pytest.approx(2 * short.saved, rel=1e-3)
        assert long.backward < 2.1 * short.backward


@pytest.mark.parametrize("width", [8, 24])
def test_values_may_be_narrower_or_wider_than_keys(width: int):
    """The kernel takes them equally wide alone, and so does its stand-in. torch computes the rest itself."""
    register_plain_varlen()
    (query, key, _, _), _ = random_inputs()
    value, lengths = torch.randn(2, KEY_HEADS, LENGTH, width, requires_grad=True), [10, 14, 24]
    out, _ = varlen_attention(nn.Module(), query, key, value, None, **markers(lengths))
    rows = zip(*(x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (query, key, value)), strict=True)
    parts = [[x.transpose(0, 1) for x in row] for row in rows]
    wanted = torch.cat([F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in parts], 1)
    wanted = wanted.transpose(0, 1).view(2, LENGTH, HEADS, width)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        *(torch.autograd.grad(each.square().sum(), (query, key, value)) for each in (out, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_model_whose_values_are_narrower_has_a_plan():
    config = load_config(["model=deepseek-v3", "training.max_length=256"])
    model = trace_config(make_config(config.model.config, "deepseek-v3"), config)
    assert model.computing.attention == VARLEN
    assert model.layer_use(ModuleSpec.of(config), BatchSpec.of(config, 1), 0, Policy.none).saved > 0


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "flint", "deepseek_v3"])
def test_a_whole_model_computes_packed_rows_as_if_they_were_alone(family: str):
    """Stock transformers' eager attention computes them alone; these functions compute them packed."""
    register_plain_varlen()
    AttentionInterface.register(VARLEN, varlen_attention)
    assert RowTrial(real_config(family), 2**20).why_not_packed(VARLEN) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpus_that_have_the_kernel_use_it_for_gpt_oss(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    name, note = attention.choose_attention("auto", GptOssConfig(), torch.device("cuda", 0), dtype)
    if dtype is torch.bfloat16:
        assert (name, note) == (VARLEN, None)
    else:
        assert name == "eager" and "bfloat16 or float16, not torch.float32" in note
