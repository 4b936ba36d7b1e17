r"""The gated delta rule (arXiv:2412.06464), of the linear attention of Qwen3-Next and Qwen 3.5, by chunks of tokens.

A head has a state S, a matrix of D x E that answers a key with a value. Each token makes it forget a part, reads it
with its key, and writes what the answer lacks of its value:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    output = S^T q

Token by token that is a product of vectors, and slow. Within a chunk of C tokens the same is a triangular system. Let G
be the sum of g in the chunk up to a token, K, V and Q the chunk's rows, and S the state before it. Then

    between_ij = exp(G_i - G_j)  for j <= i of one row, else 0
    into_i     = exp(G_i)        if no row has begun in the chunk up to i, else 0
    out_i      = exp(G_C - G_i)  if none begins behind i, else 0;    keep = exp(G_C), or 0 if one has begun
    A   = the part below the diagonal of (beta K K^T) * between
    T   = (I + A)^-1;    U = T beta V;    W = T beta into K
    new = U - W S                                      the values that are written
    output   = into Q S + (Q K^T * between) new
    S behind = keep S + (out K)^T new

Rows may begin anywhere in a chunk: what crosses the beginning of a row is multiplied by 0. Queries and keys are divided
by their length first, and queries by the root of D. Backward keeps queries, keys, values, g and beta, and makes all
else again. The chunked form is that of arXiv:2406.06484.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.layers.kernels import triton_delta_rule, triton_delta_rule_backward
from qlora_fsdp.layers.kernels.launch import has_kernels
from qlora_fsdp.layers.kernels.triton_delta_rule import CHUNK, EPSILON, Chunks

# A program of the kernels has whole keys in its registers. Heads of 16 channels were computed wrongly on an H100 with
# Triton 3.6, and those in use have 96 and more.
KERNEL_KEY_WIDTHS = range(64, 129)
MIN_KERNEL_VALUE_WIDTH = 64


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, rows: Tensor) -> Tensor:
    """The outputs of the gated delta rule: [B, T, Hv, E], in the dtype of the values.

    Args:
        query: [B, T, Hk, D]; each is divided by its length here.
        key: [B, T, Hk, D]; likewise.
        value: [B, T, Hv, E]. Hv is a multiple of Hk: a head of keys serves Hv / Hk adjacent heads of values.
        gate: [B, T, Hv], g of the formula: the logarithm of what is kept of the state, at most 0.
        beta: [B, T, Hv], how much of what an answer lacks is written.
        rows: int32 [B, T], the row that a token belongs to, rising along a sequence; no state goes from row to row.
    """
    if can_use_kernels(key, value):
        found = _DeltaRule.apply(query, key, value, gate.float(), beta.float(), rows)  # type: ignore[no-untyped-call]
        return cast(Tensor, found)
    return _by_chunks(query, key, value, gate, beta, rows).to(value.dtype)


def can_use_kernels(key: Tensor, value: Tensor) -> bool:
    """Whether the Triton kernels compute it: in 16 bits on a GPU, for heads of the widths that models have."""
    fits = key.shape[-1] in KERNEL_KEY_WIDTHS and value.shape[-1] >= MIN_KERNEL_VALUE_WIDTH
    return fits and value.dtype.itemsize == 2 and has_kernels(value)


class _DeltaRule(torch.autograd.Function):
    """The rule by Triton kernels, which know how to go back."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, rows: Tensor
    ) -> Tensor:
        """The outputs [B, T, Hv, E]."""
        query = _with_adjacent_channels(query)
        key = _with_adjacent_channels(key)
        value = _with_adjacent_channels(value)
        gate = gate.contiguous()
        beta = beta.contiguous()
        rows = rows.contiguous()
        ctx.save_for_backward(query, key, value, gate, beta, rows)
        return triton_delta_rule.forward(Chunks(query, key, value, gate, beta, rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all but the rows."""
        grad_output = grads[0].contiguous()
        found = triton_delta_rule_backward.backward(Chunks(*ctx.saved_tensors), grad_output)
        return *found, None


def _with_adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_chunks(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, rows: Tensor) -> Tensor:
    """The same in plain torch, in float32: on a CPU, and what the kernels are compared with."""
    num_tokens = value.shape[1]
    num_missing = -num_tokens % CHUNK
    num_chunks = (num_tokens + num_missing) // CHUNK
    query = _chunk(_unit(query) * key.shape[-1] ** -0.5, value.shape[2])
    key = _chunk(_unit(key), value.shape[2])
    value_BHNCE = _chunk(value, value.shape[2])
    beta_BHNC = _chunk(beta[..., None], value.shape[2])
    total = _chunk(gate[..., None], value.shape[2])[..., 0].cumsum(-1)
    row = F.pad(rows, (0, num_missing), value=-2).view(len(rows), 1, num_chunks, CHUNK)
    last = row[..., -1:]
    before = F.pad(last[:, :, :-1], (0, 0, 1, 0), value=-1)
    is_seen = (row[..., :, None] == row[..., None, :]).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~is_seen, -torch.inf).exp()
    into = total.exp() * (row == before)
    out = (total[..., -1:] - total).exp() * (row == last)
    keep = total[..., -1].exp() * (last == before)[..., 0]

    a = (beta_BHNC * key @ key.mT) * between  # the solver reads what is below the diagonal, and takes that for ones
    u = torch.linalg.solve_triangular(a, beta_BHNC * value_BHNCE, upper=False, unitriangular=True)
    w = torch.linalg.solve_triangular(a, beta_BHNC * into[..., None] * key, upper=False, unitriangular=True)
    seen = (query @ key.mT) * between
    read = into[..., None] * query
    written = (out[..., None] * key).mT
    state = value.new_zeros(*value_BHNCE.shape[:2], key.shape[-1], value.shape[-1], dtype=torch.float32)
    outputs = []
    for chunk in range(num_chunks):
        new = u[:, :, chunk] - w[:, :, chunk] @ state
        outputs.append(read[:, :, chunk] @ state + seen[:, :, chunk] @ new)
        state = keep[:, :, chunk, None, None] * state + written[:, :, chunk] @ new
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """Vectors divided by their length, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def _chunk(x_BTHD: Tensor, num_heads: int) -> Tensor:
    """[B, heads of the values, chunks, CHUNK, D] in float32, filled up with zeros."""
    x_BTHD = x_BTHD.float().repeat_interleave(num_heads // x_BTHD.shape[2], 2)
    num_missing = -x_BTHD.shape[1] % CHUNK
    padded = F.pad(x_BTHD, (0, 0, 0, 0, 0, num_missing)).transpose(1, 2)
    return padded.reshape(*padded.shape[:2], -1, CHUNK, padded.shape[3])
