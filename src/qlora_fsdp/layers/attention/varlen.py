"""torch's variable-length flash attention, which is told where packed rows start; and the same with sinks.

A sink is a logit that a head has beside those of its keys, and that has no value: it takes its share of the softmax,
and a head that finds nothing to attend to gives its share to it. gpt-oss trains one for each head. torch's kernel knows
none, but it returns what is needed to add it. For a query with logits S_j let L = log sum_j exp(S_j), which the kernel
returns beside its output o. A sink s joins the sum:

    L' = log(exp(L) + exp(s))        o' = o exp(L - L')

The kernel's backward takes L and o as arguments: it makes the weights P_j = exp(S_j - L) again, and the gradient
dS_j = P_j (do . v_j - do . o) of each logit. With L' and o' in their places these are the weights and gradients of
attention with a sink, and so are dq, dk and dv. The sink's own is ds = -exp(s - L') (do . o'), summed over the queries.

Shapes: [T, H, D], T tokens of all rows one after another, H heads of size D; keys and values may have fewer heads, of
which H is a multiple. Everything is bf16 or fp16, and log-sums are fp32 [H, T].
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CAUSAL = (-1, 0)  # how many tokens are seen before and after the query's; -1 for all


class PackedRows(NamedTuple):
    """Packed rows, and what a query sees of its own: always what comes before it.

    Attributes:
        starts: int32 [rows + 1], where rows start, and last T.
        longest: tokens of the longest row.
        window: how many tokens a query sees, itself included; None for all before it.
    """

    starts: Tensor
    longest: int
    window: int | None = None


def attend(
    q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, rows: PackedRows, scale: float | None, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal attention within each row: [T, H, V].

    Args:
        q_THD: queries.
        k_THD: keys.
        v_THV: values. The kernel wants them as wide as the keys: the narrower of both get columns of zeros, which
            change no logit and are cut off the output.
        rows: where rows start.
        scale: factor of the logits; None for 1 / sqrt(D).
        sinks_H: logits of the heads' sinks, which `scale` does not multiply, in any dtype; None if they have none.
    """
    size, width = q_THD.shape[-1], v_THV.shape[-1]
    scale = size**-0.5 if scale is None else scale
    q, k, v = (_widen(x, max(size, width)) for x in (q_THD, k_THD, v_THV))
    out: Tensor
    if sinks_H is not None:
        out = _WithSinks.apply(q, k, v, sinks_H, rows, scale)  # type: ignore[no-untyped-call]
    else:
        out, _ = _forward(q, k, v, rows, scale)
    return out if width >= size else out[..., :width]


def _widen(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


class _WithSinks(torch.autograd.Function):
    """Keeps q, k, v, o' and L': a number for each query and head more than its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, rows: PackedRows, scale: float) -> Tensor:
        out, log_sums = _forward(q, k, v, rows, scale)
        with_sinks = torch.logaddexp(log_sums, sinks.float()[:, None])
        out.mul_(log_sums.sub_(with_sinks).exp_().t()[..., None])
        ctx.save_for_backward(q, k, v, out, with_sinks, sinks if ctx.needs_input_grad[3] else None)
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, sinks = ctx.saved_tensors
        (starts, longest, _), window = ctx.rows, _window(ctx.rows)
        lengths = (starts, starts, longest, longest)  # of queries and of keys
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # nothing is dropped
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, log_sums, *lengths, window == CAUSAL, random_state, ctx.scale, list(window)
        )
        d_sinks = None
        if sinks is not None:
            shares = (sinks.float()[:, None] - log_sums).exp()
            d_sinks = -(shares * (grad.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None


def _window(rows: PackedRows) -> tuple[int, int]:
    return CAUSAL if rows.window is None else (rows.window - 1, 0)


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sums. torch gives the log-sums no gradient."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # on a host without it other kernels are chosen

    options: dict[str, Any] = {"window_size": _window(rows), "scale": scale, "return_aux": AuxRequest(lse=True)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch >= 2.13; earlier versions need none
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    starts, longest, _ = rows
    out, log_sums = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    return out, log_sums
