"""Triton kernels between the matrix products of attention with wide heads (layers/attention/wide.py).

Imported on GPUs only. A program has one row: the logits of one query and head with all keys of a chunk. A query sees
the keys from the first one of its packed row, or of its window, up to its own place. What lies outside is written as 0
and not read.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

_BLOCK = 1024  # keys at a time
_NUM_WARPS = 4
# The logit of what a query does not see. It is finite, so that the difference of two is a number; its exponential less
# that of any logit is 0.
_UNSEEN: tl.constexpr = tl.constexpr(-1e30)


@kernel
@triton.jit
def _softmax_kernel(
    logits, first_keys, weights, log_sums, num_keys, num_queries, first_query, scale, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = (row % num_queries).to(tl.int32)
    first = tl.load(first_keys + query)
    last = first_query + query
    logits += row * num_keys
    weights += row * num_keys
    in_block = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], _UNSEEN, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(first // BLOCK, last // BLOCK + 1):
        key = block * BLOCK + in_block
        is_seen = (key >= first) & (key <= last)
        logit = tl.where(is_seen, tl.load(logits + key, mask=is_seen, other=0.0) * scale, _UNSEEN)
        new_top = tl.maximum(top, logit)
        total = total * tl.exp(top - new_top) + tl.exp(logit - new_top)
        top = new_top
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(log_sums + row, log_sum)
    for block in tl.range(0, tl.cdiv(num_keys, BLOCK)):
        key = block * BLOCK + in_block
        is_seen = (key >= first) & (key <= last)
        logit = tl.where(is_seen, tl.load(logits + key, mask=is_seen, other=0.0) * scale, _UNSEEN)
        weight = tl.exp(logit - log_sum)
        tl.store(weights + key, weight.to(weights.dtype.element_ty), mask=key < num_keys)


@kernel
@triton.jit
def _softmax_backward_kernel(
    logits,
    d_weights,
    first_keys,
    log_sums,
    deltas,
    weights,
    d_logits,
    num_keys,
    num_queries,
    first_query,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query = (row % num_queries).to(tl.int32)
    block = tl.program_id(1)
    first = tl.load(first_keys + query)
    last = first_query + query
    log_sum = tl.load(log_sums + row)
    delta = tl.load(deltas + row)
    key = block * BLOCK + tl.arange(0, BLOCK)
    is_key = key < num_keys
    is_seen = (key >= first) & (key <= last)
    place = row * num_keys + key
    logit = tl.where(is_seen, tl.load(logits + place, mask=is_seen, other=0.0) * scale, _UNSEEN)
    d_weight = tl.load(d_weights + place, mask=is_seen, other=0.0)
    weight = tl.exp(logit - log_sum)
    d_logit = weight * (d_weight - delta) * scale
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=is_key)
    tl.store(d_logits + place, d_logit.to(d_logits.dtype.element_ty), mask=is_key)


class QueryChunk(NamedTuple):
    """What a chunk of C consecutive queries sees.

    Attributes:
        first_keys: int32 [C], the first key that each query sees. The last one is its own.
        first_query: which key is the first query's own. The others follow.
        scale: factor of the logits.
    """

    first_keys: Tensor
    first_query: int
    scale: float


def softmax(logits: Tensor, chunk: QueryChunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights of the keys that each query sees.

    Args:
        logits: float32 [G, N, K], products of queries with the first K keys; not scaled yet. N is a multiple of the
            chunk's queries C, which are its last dimension.
        chunk: the queries.
        dtype: that of the weights.

    Returns:
        The weights [G, N, K], and float32 [G, N], the logarithm of what they were divided by.
    """
    weights = torch.empty_like(logits, dtype=dtype)
    log_sums = logits.new_empty(logits.shape[:2])
    _softmax_kernel[(log_sums.numel(),)](
        logits,
        chunk.first_keys,
        weights,
        log_sums,
        logits.shape[2],
        len(chunk.first_keys),
        chunk.first_query,
        chunk.scale,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return weights, log_sums


def softmax_backward(
    logits: Tensor, d_weights: Tensor, log_sums: Tensor, deltas: Tensor, chunk: QueryChunk, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights once more, and the gradient of the products of queries and keys.

    Args:
        logits: as given to `softmax`.
        d_weights: float32 [G, N, K], the gradient of the weights.
        log_sums: float32 [G, N], as `softmax` has returned them; they and the deltas may lie in memory in any way.
        deltas: float32 [G, N], for each query the sum of weights times their gradients.
        chunk: as given to `softmax`.
        dtype: that of both results.

    Returns:
        Weights, and gradient of the products: both [G, N, K].
    """
    weights = torch.empty_like(logits, dtype=dtype)
    d_logits = torch.empty_like(weights)
    num_keys = logits.shape[2]
    _softmax_backward_kernel[(log_sums.numel(), triton.cdiv(num_keys, _BLOCK))](
        logits,
        d_weights,
        chunk.first_keys,
        log_sums.contiguous(),
        deltas.contiguous(),
        weights,
        d_logits,
        num_keys,
        len(chunk.first_keys),
        chunk.first_query,
        chunk.scale,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return weights, d_logits
