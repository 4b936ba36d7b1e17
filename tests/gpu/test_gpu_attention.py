"""Kernels for packed rows against plain attention in float64: grouped heads, sliding windows, gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qlora_fsdp.layers import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention import flash_attention_4, varlen_attention

# Lengths of the rows packed into 2 sequences of 96 tokens; None: one row a sequence.
PACKS = [[40, 56, 1, 30, 65], [96, 96], None]
KERNELS = [varlen_attention, flash_attention_4]


def need(kernel: Callable, head_dim: int) -> None:
    if kernel is flash_attention_4:
        reason = flash_4.why_not(4, 2, head_dim, torch.bfloat16, torch.device("cuda", 0))
        if reason is not None:
            pytest.skip(reason)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int] | None, window: int | None) -> Tensor:
    """[B, L, H, D]: softmax attention with a mask that says which tokens of the same row come before."""
    batch, num_heads, length, head_dim = query.shape
    rows = torch.arange(batch).repeat_interleave(length)
    if lengths is not None:
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows, positions = rows.view(batch, length).to(query.device), torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]
    mask = (rows[:, :, None] == rows[:, None, :]) & (distance >= 0) & (distance < (window or length))
    key, value = (t.repeat_interleave(num_heads // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) / head_dim**0.5
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_plain_attention(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable, lengths: list[int] | None, window: int | None, head_dim: int
):
    need(kernel, head_dim)
    monkeypatch.setattr(flash_4, "MIN_MEAN_ROW", 0)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 96, head_dim, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
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
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    for found, wanted in zip(ours, exact, strict=True):
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 1e-2


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
