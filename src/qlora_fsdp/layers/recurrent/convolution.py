"""A short causal convolution along tokens that knows where rows begin, before a gated delta rule or a state space.

Each channel is by itself: y_t = act(bias + sum_j weight_j x_(t - J + 1 + j)), over J taps. Those count that lie in the
row of token t.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.layers.kernels import triton_short_convolution
from qlora_fsdp.layers.kernels.launch import has_kernels


def short_convolution(x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, has_silu: bool) -> Tensor:
    """The convolution [B, T, C], in the dtype of x.

    Args:
        x_BTC: [B, T, C].
        weight: [C, taps].
        bias: [C], or None.
        rows: int32 [B, T], the row that a token belongs to.
        has_silu: apply SiLU to the sums.
    """
    is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    is_short = weight.shape[1] <= triton_short_convolution.MAX_TAPS
    if has_kernels(x_BTC) and is_short and not is_trained:
        return cast(Tensor, _ShortConvolution.apply(x_BTC, weight, bias, rows, has_silu))  # type: ignore[no-untyped-call]
    wide = x_BTC.to(weight.dtype)
    total = torch.zeros_like(wide) if bias is None else bias.expand_as(wide)
    num_taps = weight.shape[1]
    for tap in range(num_taps):
        distance = num_taps - 1 - tap
        earlier = F.pad(wide, (0, 0, distance, 0))[:, : wide.shape[1]]
        is_seen = F.pad(rows, (distance, 0), value=-1)[:, : rows.shape[1]] == rows
        total = total + earlier * (is_seen[..., None] * weight[:, tap])
    return (F.silu(total) if has_silu else total).to(x_BTC.dtype)


class _ShortConvolution(torch.autograd.Function):
    """The same by Triton kernels, for weights that are frozen."""

    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, has_silu: bool) -> Tensor:
        """The convolution, contiguous."""
        x_BTC = x_BTC if x_BTC.stride(-1) == 1 else x_BTC.contiguous()
        weight = weight.contiguous()
        rows = rows.contiguous()
        ctx.save_for_backward(x_BTC, weight, bias, rows)
        ctx.has_silu = has_silu
        return triton_short_convolution.forward(x_BTC, weight, bias, rows, has_silu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        x_BTC, weight, bias, rows = ctx.saved_tensors
        grad = triton_short_convolution.backward(x_BTC, weight, bias, rows, grads[0].contiguous(), ctx.has_silu)
        return grad, None, None, None, None
