"""Attention of heads that are too wide for flash kernels: torch's memory-efficient kernel, which takes any width.

Flash kernels end at heads of 256 (`choose.MAX_HEAD_DIM`), and Gemma 4's full attention has heads of 512. The
memory-efficient kernel (xFormers'; Rabe and Staats, arXiv:2112.05682) is exact too, and keeps no matrix of all queries
and keys. It could be told where packed rows start, but for heads this wide its backward then makes room for every row
as if each were as long as the longest. So packed rows are kept apart by a bias, -inf between tokens of different rows,
which is made from their starts for each call: B * L * L numbers of 2 bytes while the kernel runs. What comes later is
skipped by the kernel; other rows are not.

The kernel wants as many heads of keys as of queries. Copies are made for the kernel alone: what waits for backward are
the keys and values as the model made them.

Shapes: [B, H, L, D], B sequences of L tokens, H heads of size D; keys and values may have fewer heads, of which H is a
multiple. Everything is bf16, fp16 or fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16  # the kernel reads a bias whose rows lie a multiple of as many numbers apart

aten: Any = torch.ops.aten


def attend(
    q_BHLD: Tensor, k_BHLD: Tensor, v_BHLV: Tensor, starts: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention within each row: [B, L, H, V].

    Args:
        q_BHLD: queries.
        k_BHLD: keys.
        v_BHLV: values.
        starts: int32 [rows + 1], where rows start in the flattened B * L tokens, and last B * L; None if a sequence is
            one row.
        window: how many tokens a query sees, itself included; None for all before it.
        scale: factor of the logits; None for 1 / sqrt(D).
    """
    scale = q_BHLD.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Wide.apply(q_BHLD, k_BHLD, v_BHLV, starts, window, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous()


class _Wide(torch.autograd.Function):
    """Keeps q, k, v, the output, and a log-sum for each query and head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None, scale: float
    ) -> Tensor:
        key, value = _for_each_head(k, q), _for_each_head(v, q)
        out, log_sums, *random_state = aten._scaled_dot_product_efficient_attention(
            q, key, value, _bias(q, starts, window), True, 0.0, True, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.starts = starts
        ctx.window = window
        ctx.scale = scale
        ctx.random_state = random_state  # of dropout, which there is none of
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        key, value = _for_each_head(k, q), _for_each_head(v, q)
        bias = _bias(q, ctx.starts, ctx.window)
        wanted = [True, True, True, False]  # gradients of queries, keys and values, none of the bias
        d_q, d_key, d_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            grads[0], q, key, value, bias, out, log_sums, *ctx.random_state, 0.0, wanted, True, scale=ctx.scale
        )
        return d_q, _of_each_key_head(d_key, k), _of_each_key_head(d_value, v), None, None, None


def _bias(q_BHLD: Tensor, starts: Tensor | None, window: int | None) -> Tensor | None:
    """[B, H, L, L], what is added to logits: -inf between tokens of different rows or beyond the window, else 0.

    None where the kernel's own order of tokens is all that is needed.
    """
    if starts is None and window is None:
        return None
    batch, num_heads, length, _ = q_BHLD.shape
    padded = -(-length // _ALIGNED) * _ALIGNED
    bias = q_BHLD.new_zeros(batch, 1, length, padded)[..., :length]
    tokens = torch.arange(batch * length, device=q_BHLD.device)
    if starts is not None:
        row = torch.bucketize(tokens, starts[1:].long(), right=True).view(batch, 1, length)
        bias.masked_fill_(row[..., :, None] != row[..., None, :], float("-inf"))
    if window is not None:
        ago = tokens[:length, None] - tokens[:length]
        bias.masked_fill_(ago >= window, float("-inf"))
    return bias.expand(batch, num_heads, length, length)


def _for_each_head(x_BGLD: Tensor, q_BHLD: Tensor) -> Tensor:
    """Keys or values [B, H, L, D] for each head of the queries."""
    copies = q_BHLD.shape[1] // x_BGLD.shape[1]
    return x_BGLD if copies == 1 else x_BGLD.repeat_interleave(copies, dim=1)


def _of_each_key_head(gradient_BHLD: Tensor, x_BGLD: Tensor) -> Tensor:
    """The gradient of keys or values [B, G, L, D]: the sum over the query heads that share one."""
    num_key_heads = x_BGLD.shape[1]
    if gradient_BHLD.shape[1] == num_key_heads:
        return gradient_BHLD
    summed: Tensor = gradient_BHLD.unflatten(1, (num_key_heads, -1)).sum(2)
    return summed
