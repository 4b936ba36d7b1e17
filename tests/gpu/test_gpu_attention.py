"""Kernels for packed rows against plain attention in float64: grouped heads, windows, sinks, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention.choose import flash_attention_4, varlen_attention

# Lengths of the rows packed into 2 sequences of 96 tokens; None: one row a sequence.
PACKS = [[40, 56, 1, 30, 65], [96, 96], None]
KERNELS = [varlen_attention, flash_attention_4]


def need(kernel: Callable, head_dim: int) -> None:
    if kernel is flash_attention_4:
        reason = flash_4.why_not(4, 2, head_dim, torch.bfloat16, torch.device("cuda", 0))
        if reason is not None:
            pytest.skip(reason)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int] | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, L, H, D]: softmax attention with a mask that says which tokens of the same row come before.

    A sink is one more logit of a query, whose share of the softmax is dropped.
    """
    batch, num_heads, length, head_dim = query.shape
    rows = torch.arange(batch).repeat_interleave(length)
    if lengths is not None:
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows, positions = rows.view(batch, length).to(query.device), torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]
    mask = (rows[:, :, None] == rows[:, None, :]) & (distance >= 0) & (distance < (window or length))
    key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) / head_dim**0.5
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(batch, -1, length, 1)], dim=-1)
    return (scores.softmax(-1)[..., :length] @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("head_dim", "num_key_heads"), [(16, 2), (64, 2), (72, 2), (128, 2), (256, 2), (512, 2), (512, 4)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_plain_attention(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Callable,
    lengths: list[int] | None,
    window: int | None,
    head_dim: int,
    num_key_heads: int,
):
    need(kernel, head_dim)
    monkeypatch.setattr(flash_4, "MIN_MEAN_ROW", 0)
    torch.manual_seed(0)
    num_heads = (4, num_key_heads, num_key_heads)
    inputs = [torch.randn(2, heads, 96, head_dim, device="cuda", dtype=torch.bfloat16) for heads in num_heads]
    grad = torch.randn(2, 96, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    starts = None
    if lengths is not None:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")

    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    out, _ = kernel(
        torch.nn.Module(),
        *ours,
        None,
        sliding_window=window,
        cu_seq_lens_q=starts,
        max_length_q=None if lengths is None else max(lengths),
    )
    out.backward(grad)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    query, key, value = exact
    expected = plain_attention(query, key, value, lengths, window)
    expected.backward(grad.double())
    assert out.shape == expected.shape
    assert out.is_contiguous(), "the model would copy it for the next layer, and both would be kept for backward"
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    for found, wanted in zip(ours, exact, strict=True):
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 1e-2


@pytest.mark.parametrize("lengths", [[640, 128, 1, 255, 700, 324], [1024, 1024], None])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_at_the_sizes_of_gpt_oss(kernel: Callable, lengths: list[int] | None, window: int | None):
    """64 heads of 64, 8 of keys. Sinks weigh little or nearly all; they are trained here, to see their gradient."""
    torch.manual_seed(0)
    shapes = [(2, heads, 1024, 64) for heads in (64, 8, 8)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    inputs.append(torch.linspace(-4, 8, 64, device="cuda").bfloat16())
    grad = torch.randn(2, 1024, 64, 64, device="cuda", dtype=torch.bfloat16)
    rows: dict[str, Any] = {}
    if lengths is not None:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
        rows = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}

    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    out, _ = kernel(torch.nn.Module(), *ours[:3], None, sliding_window=window, s_aux=ours[3], **rows)
    out.backward(grad)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    q, k, v, sinks = exact
    expected = plain_attention(q, k, v, lengths, window, sinks)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    for found, wanted in zip(ours, exact, strict=True):
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_may_be_narrower_than_keys(kernel: Callable):
    """As in DeepSeek V3: heads of 192, of which the values have 128."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 4, 96, size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in (192, 192, 128)
    )
    lengths = [40, 56, 1, 30, 65]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    out, _ = kernel(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=65)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    q, k, v = exact
    expected = plain_attention(q, k, v, lengths, None)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    found = torch.autograd.grad(out, (query, key, value), grad.bfloat16())
    for ours, theirs in zip(found, torch.autograd.grad(expected, exact, grad), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_see_the_row_before(monkeypatch: pytest.MonkeyPatch, kernel: Callable):
    need(kernel, 32)
    monkeypatch.setattr(flash_4, "MIN_MEAN_ROW", 0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 64, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    starts = torch.tensor([0, 24, 64], dtype=torch.int32, device="cuda")

    def second_row(key: Tensor, value: Tensor) -> Tensor:
        out, _ = kernel(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=starts, max_length_q=40)
        return out[:, 24:]

    other_key, other_value = key.clone(), value.clone()
    other_key[:, :, :24] = torch.randn_like(other_key[:, :, :24])
    other_value[:, :, :24] = torch.randn_like(other_value[:, :, :24])
    assert torch.equal(second_row(key, value), second_row(other_key, other_value))
