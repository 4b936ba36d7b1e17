"""The gated delta rule, the short convolution and the gated norm against transformers' own functions, in plain torch
and by the Triton kernels, which run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import unwrap

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from qlora_fsdp.layers.kernels import (
    triton_delta_rule,
    triton_delta_rule_backward,
    triton_norm,
    triton_short_convolution,
)
from qlora_fsdp.layers.kernels.triton_delta_rule import Chunks
from qlora_fsdp.layers.recurrent import replace
from qlora_fsdp.layers.recurrent.delta_rule import gated_delta_rule
from qlora_fsdp.layers.recurrent.gated_norm import use_gated_norm
from qlora_fsdp.layers.recurrent.replace import short_convolution

stock_rule = unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
# Where rows end: inside chunks of 64 and at their bounds; rows of one token, of a chunk, and over several chunks.
ENDS = [(37, 64, 65, 150), (64,), (1, 2, 200)]
# Key heads, value heads, widths of keys and values: as in Qwen 3.5, and such as no block divides.
SHAPES = [(1, 2, 32, 64), (2, 2, 24, 40)]


def rows_of(ends: Sequence[int], num_sequences: int = 1) -> Tensor:
    tokens = torch.arange(ends[-1])
    rows = torch.bucketize(tokens, torch.tensor(ends), right=True).int()
    return rows.expand(num_sequences, -1).contiguous()


def draw(ends: Sequence[int], shape: tuple[int, int, int, int]) -> list[Tensor]:
    torch.manual_seed(0)
    key_heads, value_heads, key_width, value_width = shape
    query = torch.randn(1, ends[-1], key_heads, key_width)
    key = torch.randn(1, ends[-1], key_heads, key_width)
    value = torch.randn(1, ends[-1], value_heads, value_width)
    gate = -torch.rand(1, ends[-1], value_heads)
    beta = torch.rand(1, ends[-1], value_heads)
    return [tensor.requires_grad_() for tensor in (query, key, value, gate, beta)]


def by_stock(inputs: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
    """Each row by itself, as transformers computes it."""
    parts = []
    for start, end in zip((0, *ends), ends, strict=False):
        row = [tensor[:, start:end] for tensor in inputs]
        parts.append(stock_rule(*row, use_qk_l2norm_in_kernel=True)[0])
    return torch.cat(parts, 1)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).detach().abs().max()) <= tolerance * float(theirs.detach().abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", ENDS)
def test_the_delta_rule_is_each_rows_own(ends: tuple[int, ...], shape: tuple[int, int, int, int]):
    inputs = draw(ends, shape)
    expected = by_stock(inputs, ends)
    weights = torch.randn_like(expected)
    of_stock = torch.autograd.grad((expected * weights).sum(), inputs)
    found = gated_delta_rule(*inputs, rows_of(ends))
    assert_equal([found, *torch.autograd.grad((found * weights).sum(), inputs)], [expected, *of_stock])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", ENDS)
def test_the_kernels_compute_the_delta_rule(ends: tuple[int, ...], shape: tuple[int, int, int, int]):
    pytest.importorskip("triton")
    inputs = draw(ends, shape)
    expected = by_stock(inputs, ends)
    weights = torch.randn_like(expected)
    of_stock = torch.autograd.grad((expected * weights).sum(), inputs)
    chunks = Chunks(*(tensor.detach() for tensor in inputs), rows_of(ends))
    found = triton_delta_rule.forward(chunks)
    assert_equal([found, *triton_delta_rule_backward.backward(chunks, weights)], [expected, *of_stock])


def test_keys_that_are_all_alike_lose_nothing():
    """The inverse of such a system is simple, and powers of its matrix are huge."""
    pytest.importorskip("triton")
    inputs = [tensor.detach() for tensor in draw((64,), (1, 1, 16, 16))]
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).contiguous()
    inputs[3] = torch.full_like(inputs[3], -1e-3)
    inputs[4] = torch.full_like(inputs[4], 0.999)
    found = triton_delta_rule.forward(Chunks(*inputs, rows_of((64,))))
    assert_equal([found], [by_stock(inputs, (64,))])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_silu", [True, False])
def test_the_convolution_is_each_rows_own(has_bias: bool, has_silu: bool):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    ends = (7, 8, 40, 50)
    x = torch.randn(2, ends[-1], 140, requires_grad=True)
    weight = torch.randn(140, 4)
    bias = torch.randn(140) if has_bias else None
    rows = rows_of(ends, 2)
    parts = []
    for start, end in zip((0, *ends), ends, strict=False):
        part = F.conv1d(x[:, start:end].mT, weight[:, None], bias, padding=3, groups=140)[..., : end - start].mT
        parts.append(F.silu(part) if has_silu else part)
    expected = torch.cat(parts, 1)
    weights = torch.randn_like(expected)
    (of_stock,) = torch.autograd.grad((expected * weights).sum(), x)
    plain = short_convolution(x, weight, bias, rows, has_silu)
    (of_plain,) = torch.autograd.grad((plain * weights).sum(), x)
    data = x.detach()
    by_kernel = triton_short_convolution.forward(data, weight, bias, rows, has_silu)
    of_kernel = triton_short_convolution.backward(data, weight, bias, rows, weights, has_silu)
    assert_equal([plain, of_plain, by_kernel, of_kernel], [expected, of_stock, expected, of_stock])


def test_the_gated_norm_of_the_kernels():
    pytest.importorskip("triton")
    torch.manual_seed(0)
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(40)
    nn.init.normal_(norm.weight)
    x = torch.randn(70, 40, requires_grad=True)
    gate = torch.randn(70, 40, requires_grad=True)
    expected = norm(x, gate)
    weights = torch.randn_like(expected)
    of_stock = torch.autograd.grad((expected * weights).sum(), (x, gate))
    inputs = (x.detach(), gate.detach(), norm.weight.detach(), norm.variance_epsilon)
    found = triton_norm.gated_forward(*inputs)
    assert_equal([found, *triton_norm.gated_backward(*inputs, weights)], [expected, *of_stock])


class Layer(nn.Module):
    """Stands for a layer of a family: its class's Python module says which functions it calls."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(2, 2, 4)
        self.__class__ = type("Layer", (Layer,), {"__module__": source})


@pytest.mark.parametrize(
    ("source", "names", "wants_one"),
    [
        (
            modeling_qwen3_next,
            ["causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"],
            False,
        ),
        (modeling_lfm2, ["causal_conv1d_fn"], True),
    ],
)
def test_what_computes_the_same_is_replaced_while_it_is_asked_for(source, names: list[str], wants_one: bool):
    """Another test of this process may have replaced them for good, so that it begins with plain ones."""
    layer = Layer(source.__name__)
    with replace.plain_functions(layer):
        before = [vars(source)[name] for name in names]
        assert replace.wants_one_sequence(layer) == wants_one
        with replace.replaced_functions(layer):
            assert all(vars(source)[name] is not function for name, function in zip(names, before, strict=True))
            with replace.plain_functions(layer):
                assert [vars(source)[name] for name in names] == [unwrap(function) for function in before]
        assert [vars(source)[name] for name in names] == before


def test_what_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch):
    def other(hidden_states, weight, bias=None, activation=None):
        return hidden_states.roll(1, -1)

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", other)
    with replace.replaced_functions(Layer(modeling_lfm2.__name__)):
        assert modeling_lfm2.causal_conv1d_fn is other


def test_which_norms_are_gated():
    """Norms without a gate or without a weight (Gemma 4's of values, as Liger has them) stay as they are."""
    without_weight = Gemma4RMSNorm(40, with_scale=False)
    without_weight.register_parameter("weight", None)
    without_weight.variance_epsilon = 1e-6
    gated = modeling_qwen3_5.Qwen3_5RMSNormGated(40).requires_grad_(False)
    others = [modeling_qwen3_5.Qwen3_5RMSNorm(40).requires_grad_(False), without_weight]
    others.append(modeling_qwen3_5.Qwen3_5RMSNormGated(40))  # it is trained
    for norm in (gated, *others):
        use_gated_norm(norm)
    assert "forward" in vars(gated)
    assert not any("forward" in vars(norm) for norm in others)
