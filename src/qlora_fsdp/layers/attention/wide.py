"""Attention of heads that are too wide for flash kernels: matrix products, a chunk of queries at a time.

Flash kernels end at heads of 256 (`choose.MAX_HEAD_DIM`), as the sums that they keep in registers grow with the head,
and Gemma 4's full attention has heads of 512. But the wider a head, the less it costs that logits go through memory: a
logit of 4 bytes stands for a product of 512 numbers. So here a chunk of queries is multiplied with all keys before its
end, as a matrix product that any GPU has a fast kernel for; a kernel of ours makes weights of the logits
(kernels/triton_softmax.py); and a second product sums the values. Backward computes the logits again from the
log-sums, as flash attention does (Dao et al., arXiv:2205.14135), chunk by chunk.

Query heads that share a head of keys lie one after another in a chunk, so that one product has all of them, and
neither keys nor values are copied. Packed rows and windows are told apart by the first key that each query sees.

Shapes: [B, H, L, D], B sequences of L tokens, H heads of size D. Keys and values have G heads, of which H is a
multiple, and values have size V. A chunk has C queries. Everything is bf16, fp16 or fp32; logits are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels import triton_softmax
from qlora_fsdp.layers.kernels.launch import has_kernels, runs_kernels, standing_for
from qlora_fsdp.layers.kernels.triton_softmax import QueryChunk

_LOGIT_BYTES = 256 << 20  # of a chunk of queries, where rows are not so long that it would get too few
_MIN_CHUNK = 64
_MAX_CHUNK = 1024


def attend(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLV: Tensor, starts: Tensor | None, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention within each row: [B, L, H, V].

    Args:
        q_BHLD: queries.
        k_BGLD: keys.
        v_BGLV: values.
        starts: int32 [rows + 1], where rows start in the flattened B * L tokens, and last B * L; None if a sequence is
            one row.
        window: how many tokens a query sees, itself included; None for all before it.
        scale: factor of the logits; None for 1 / sqrt(D).
    """
    scale = q_BHLD.shape[-1] ** -0.5 if scale is None else scale
    first_keys = _first_keys(q_BHLD, starts, window)
    out: Tensor = _Wide.apply(q_BHLD, k_BGLD, v_BGLV, first_keys, scale)  # type: ignore[no-untyped-call]
    return out


class _Wide(torch.autograd.Function):
    """Keeps q, k, v, the output, and a log-sum for each query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first_keys: Tensor, scale: float) -> Tensor:
        batch, num_heads, length, _ = q.shape
        out = q.new_empty(batch, length, num_heads, v.shape[-1])
        log_sums = q.new_empty(batch, num_heads, length, dtype=torch.float32)
        for row, chunk in _chunks(q):
            keys = k[row, :, : chunk.stop]
            values = v[row, :, : chunk.stop]
            logits = _product_32(_by_key_head(q[row, :, chunk], keys), keys.mT)
            sees = QueryChunk(first_keys[row, chunk], chunk.start, scale)
            weights, log_sum = _softmax(logits, sees, q.dtype)
            log_sums[row, :, chunk] = log_sum.view(num_heads, -1)
            summed = torch.bmm(weights, values)
            out[row, chunk] = _by_query_head(summed, num_heads).transpose(0, 1)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.first_keys = first_keys
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        d_q = torch.empty_like(q)
        d_k = torch.zeros_like(k, dtype=torch.float32)
        d_v = torch.zeros_like(v, dtype=torch.float32)
        num_heads = q.shape[1]
        for row, chunk in _chunks(q):
            keys = k[row, :, : chunk.stop]
            values = v[row, :, : chunk.stop]
            queries = _by_key_head(q[row, :, chunk], keys)
            d_out = _by_key_head(grads[0][row, chunk].transpose(0, 1), keys)
            # Each product is rounded to the dtype, as the weights are; their sum is not.
            delta = (grads[0][row, chunk] * out[row, chunk]).sum(-1, dtype=torch.float32).T
            weights, d_logits = _softmax_backward(
                _product_32(queries, keys.mT),
                _product_32(d_out, values.mT),
                _by_key_head(log_sums[row, :, chunk], keys),
                _by_key_head(delta, keys),
                QueryChunk(ctx.first_keys[row, chunk], chunk.start, ctx.scale),
                q.dtype,
            )
            d_q[row, :, chunk] = _by_query_head(torch.bmm(d_logits, keys), num_heads)
            d_k[row, :, : chunk.stop] += _product_32(d_logits.mT, queries)
            d_v[row, :, : chunk.stop] += _product_32(weights.mT, d_out)
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _first_keys(q_BHLD: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """int32 [B, L]: the first key that each query sees, counted in its sequence."""
    batch, _, length, _ = q_BHLD.shape
    tokens = torch.arange(batch * length, dtype=torch.int32, device=q_BHLD.device)
    sequences = tokens - tokens % length
    first = sequences
    if starts is not None:
        row = torch.bucketize(tokens, starts[1:], right=True)
        first = starts[row]
    if window is not None:
        first = torch.maximum(first, tokens - (window - 1))
    return (first - sequences).clamp_min(0).view(batch, length)


def _chunks(q_BHLD: Tensor) -> Iterator[tuple[int, slice]]:
    """Each sequence's number, with the queries of each of its chunks.

    On meta a single chunk stands for all: the last one, which takes the most memory. A chunk meets half of the keys on
    average, so half as many chunks that meet them all compute as much.
    """
    batch, num_heads, length, _ = q_BHLD.shape
    size = _MAX_CHUNK
    while size > _MIN_CHUNK and 4 * num_heads * size * length > _LOGIT_BYTES:
        size //= 2
    if q_BHLD.is_meta:
        num_chunks = math.ceil(length / size)
        with standing_for(math.ceil(batch * (num_chunks + 1) / 2)):
            yield batch - 1, slice(max(0, length - size), length)
        return
    for row in range(batch):
        for start in range(0, length, size):
            yield row, slice(start, min(start + size, length))


def _by_key_head(x_HC: Tensor, keys_GKD: Tensor) -> Tensor:
    """[H, C, ...] as [G, H / G * C, ...]: what the same keys are multiplied with."""
    return x_HC.reshape(keys_GKD.shape[0], -1, *x_HC.shape[2:])


def _by_query_head(x_GND: Tensor, num_heads: int) -> Tensor:
    """The reverse of `_by_key_head`: [H, C, D]."""
    return x_GND.view(num_heads, -1, x_GND.shape[-1])


def _product_32(a: Tensor, b: Tensor) -> Tensor:
    """The batched product in float32, whatever it is of."""
    if a.dtype == torch.float32 or not runs_kernels(a):
        return torch.bmm(a.float(), b.float())
    return torch.bmm(a, b, out_dtype=torch.float32)


def _softmax(logits: Tensor, chunk: QueryChunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `triton_softmax.softmax`; where there is no Triton torch computes it."""
    if has_kernels(logits):
        return triton_softmax.softmax(logits, chunk, dtype)
    scaled = _seen(logits, chunk) * chunk.scale
    log_sums = scaled.logsumexp(-1)
    return (scaled - log_sums[..., None]).exp().to(dtype), log_sums


def _softmax_backward(
    logits: Tensor, d_weights: Tensor, log_sums: Tensor, deltas: Tensor, chunk: QueryChunk, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `triton_softmax.softmax_backward`; where there is no Triton torch computes it."""
    if has_kernels(logits):
        return triton_softmax.softmax_backward(logits, d_weights, log_sums, deltas, chunk, dtype)
    weights = (_seen(logits, chunk) * chunk.scale - log_sums[..., None]).exp()
    d_logits = weights * (d_weights - deltas[..., None]) * chunk.scale
    return weights.to(dtype), d_logits.to(dtype)


def _seen(logits_GNK: Tensor, chunk: QueryChunk) -> Tensor:
    """The logits with -inf for keys that a query does not see."""
    num_queries = len(chunk.first_keys)
    keys = torch.arange(logits_GNK.shape[-1], device=logits_GNK.device)
    last_keys = chunk.first_query + torch.arange(num_queries, device=logits_GNK.device)
    is_seen = (keys >= chunk.first_keys[:, None]) & (keys <= last_keys[:, None])
    copies = logits_GNK.shape[1] // num_queries
    return logits_GNK.masked_fill(~is_seen.repeat(copies, 1), float("-inf"))
