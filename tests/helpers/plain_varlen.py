"""torch's variable-length flash attention on a CPU, which has no kernels for it: the same two functions in plain torch.

They are registered for torch's own operators, so they are called with the arguments that the GPU's kernels get. They
compute what flash attention is published to compute (Dao, 2023): backward makes the weights again from the log-sums
that it is given, and the gradient of the logits from the output that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import varlen

from qlora_fsdp.layers.attention import choose as attention


@contextmanager
def cpu_with_varlen() -> Iterator[None]:
    """While it lasts, runs on a CPU choose varlen, as on a GPU that has it and no FlashAttention-4."""
    register_plain_varlen()
    with (
        patch.object(attention, "_why_none_for_rows", lambda config, device, dtype: None),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
    ):
        yield


@cache
def register_plain_varlen() -> None:
    """For the rest of the process."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool,
    scale: float | None,
    window: Sequence[int],
    *others: object,
) -> tuple[Tensor, Tensor, Tensor]:
    assert torch.equal(starts, key_starts) and longest == longest_keys == int(starts.diff().max())
    assert is_causal == (list(window) == [-1, 0])
    assert q.shape[2] == k.shape[2] == v.shape[2]
    logits = _logits(q, k, starts, scale, window)
    log_sums = logits.logsumexp(-1)
    out = _by_head((logits - log_sums[..., None]).exp() @ _heads(v, q))
    return out, log_sums.float(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool,
    random_state: Tensor,
    scale: float | None,
    window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    assert torch.equal(starts, key_starts) and longest == longest_keys == int(starts.diff().max())
    assert is_causal == (list(window) == [-1, 0])
    assert log_sums.shape == (q.shape[1], q.shape[0]) and random_state.shape == (2,)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (_logits(q, k, starts, scale, window) - log_sums[..., None]).exp()
    d_out = _heads(grad, q)
    d_logits = weights * (d_out @ _heads(v, q).mT - (grad * out).sum(-1).t()[..., None]) * factor
    dk, dv = d_logits.mT @ _heads(q, q), weights.mT @ d_out
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = (each.unflatten(0, groups).sum(1) for each in (dk, dv))
    return _by_head(d_logits @ _heads(k, q)), _by_head(dk), _by_head(dv)


def _heads(x_THD: Tensor, q: Tensor) -> Tensor:
    """[H, T, D], with as many heads as the queries."""
    return x_THD.repeat_interleave(q.shape[1] // x_THD.shape[1], dim=1).transpose(0, 1)


def _by_head(x_HTD: Tensor) -> Tensor:
    return x_HTD.transpose(0, 1).contiguous()


def _logits(q: Tensor, k: Tensor, starts: Tensor, scale: float | None, window: Sequence[int]) -> Tensor:
    """[H, T, T]; -inf where a key is of another row, behind the query, or out of the window."""
    logits = _heads(q, q) @ _heads(k, q).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    tokens = torch.arange(len(q))
    row = torch.bucketize(tokens, starts[1:].long(), right=True)
    before, behind = window
    ago = tokens[:, None] - tokens
    sees = (row[:, None] == row) & (ago >= -behind) & ((ago <= before) | (before == -1))
    return logits.masked_fill(~sees, float("-inf"))
