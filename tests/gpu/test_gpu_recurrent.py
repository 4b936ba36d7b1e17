"""Kernels of recurrent layers in bfloat16 against plain torch in float32, and twice the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from qlora_fsdp.layers.recurrent.delta_rule import gated_delta_rule
from qlora_fsdp.layers.recurrent.gated_norm import use_gated_norm
from qlora_fsdp.layers.recurrent.replace import short_convolution

TOLERANCE = 2e-2  # of the norm: a value of bfloat16 has 8 bits
# Key heads, value heads, widths of keys and values: of Qwen 3.5; of tiny models, which torch computes; such as no block
# divides; the narrowest.
SHAPES = [(16, 32, 128, 128), (2, 4, 16, 16), (2, 2, 96, 200), (2, 4, 64, 64)]


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """A function's result, and the gradients of a weighted sum of it."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    found = function(*leaves)
    return [found.detach(), *torch.autograd.grad((found.float() * weights).sum(), leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor]):
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        assert difference < TOLERANCE, f"tensor {place} differs by {difference:.2g} of its norm"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1000, 64])
def test_the_delta_rule(shape: tuple[int, int, int, int], num_tokens: int):
    torch.manual_seed(0)
    key_heads, value_heads, key_width, value_width = shape
    # As the convolution hands them on: parts of one tensor, whose channels are adjacent
    sizes = [key_heads * key_width, key_heads * key_width, value_heads * value_width]
    mixed = torch.randn(2, num_tokens, sum(sizes), device="cuda").bfloat16()
    gate = -torch.rand(2, num_tokens, value_heads, device="cuda") * 0.5
    beta = torch.rand(2, num_tokens, value_heads, device="cuda").bfloat16()
    ends = torch.tensor([37, 64, 65, 190, num_tokens], device="cuda").clamp(max=num_tokens)
    tokens = torch.arange(num_tokens, device="cuda")
    rows = torch.bucketize(tokens, ends, right=True).int().expand(2, -1).contiguous()
    weights = torch.randn(2, num_tokens, value_heads, value_width, device="cuda")

    def compute(mixed: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
        query, key, value = mixed.split(sizes, -1)
        query = query.unflatten(-1, (key_heads, key_width))
        key = key.unflatten(-1, (key_heads, key_width))
        value = value.unflatten(-1, (value_heads, value_width))
        return gated_delta_rule(query, key, value, gate, beta, rows)

    found = with_gradients(compute, [mixed, gate, beta], weights)
    assert_close(found, with_gradients(compute, [mixed.float(), gate, beta.float()], weights))
    again = with_gradients(compute, [mixed, gate, beta], weights)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("has_silu", [True, False])
def test_the_convolution(has_silu: bool):
    torch.manual_seed(0)
    x = torch.randn(2, 1000, 1000, device="cuda").bfloat16()
    weight = torch.randn(1000, 4, device="cuda").bfloat16()
    bias = torch.randn(1000, device="cuda").bfloat16()
    rows = (torch.arange(1000, device="cuda") // 130).int().expand(2, -1).contiguous()
    weights = torch.randn(2, 1000, 1000, device="cuda")
    found = with_gradients(lambda x: short_convolution(x, weight, bias, rows, has_silu), [x], weights)
    trained = weight.float().requires_grad_()  # with a weight that is trained plain torch computes it
    wide = bias.float()
    expected = with_gradients(lambda x: short_convolution(x, trained, wide, rows, has_silu), [x.float()], weights)
    assert_close(found, expected)


def test_the_gated_norm():
    torch.manual_seed(0)
    norm = Qwen3_5RMSNormGated(128).cuda().bfloat16().requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    stock = norm.forward
    use_gated_norm(norm)
    assert norm.forward is not stock
    x, gate, weights = torch.randn(3, 5000, 128, device="cuda").bfloat16()
    found = with_gradients(norm.forward, [x, gate], weights.float())
    assert_close(found, with_gradients(stock, [x, gate], weights.float()))
