"""Attention over sequences of which every rank has a slice, as DeepSpeed-Ulysses does it (arXiv:2309.14509).

All else that a layer computes is a token's own, so a rank computes it for its slice. For attention the ranks of a group
exchange what they have: each sends every other one its slice of some heads' queries, keys and values, and then has the
whole sequence of its own heads. Attention is computed by the same kernel as without slices, told of the same starts of
rows, so packed rows and windows need nothing. A second exchange brings the outputs back to the tokens' ranks. Backward
exchanges gradients the other way.

Where there are fewer heads of keys than ranks, or their number can't be divided, each of them is sent to several ranks:
to all that have queries for it.

Shapes: [B, l, H, D] is a slice of l tokens of all H heads, [B, L, h, D] are all L = N l tokens of h = H / N heads, for
N slices.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qlora_fsdp.common.errors import ConfigError, Problem


def slice_attention(attention: str, num_slices: int, group: dist.ProcessGroup | None) -> str:
    """Put attention over slices into transformers' registry, under a name of its own, which is returned.

    Args:
        attention: the registered implementation that attends to whole sequences; it is told where rows start.
        num_slices: ranks that share a sequence.
        group: these ranks, in the order of their slices; None where only shapes are computed, on meta.
    """
    name = f"{attention}_in_{num_slices}_slices{'' if group is not None else '_on_meta'}"
    AttentionInterface.register(name, SlicedAttention(attention, num_slices, group))
    return name


class SlicedAttention:
    """An attention function of transformers' registry; the arguments are those of `slice_attention`."""

    def __init__(self, attention: str, num_slices: int, group: dist.ProcessGroup | None) -> None:
        self.attention = attention
        self.num_slices = num_slices
        self.group = group

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of a slice's tokens to all that they see in the whole sequence.

        Args:
            module: the attention layer that calls.
            query: [B, H, l, D] of this rank's slice.
            key: [B, H_kv, l, D]; H is a multiple of H_kv.
            value: like `key`; it may have another width.
            attention_mask: None.
            s_aux: [H], logits of the heads' sinks; None if they have none.
            **kwargs: what the kernel is told: starts of rows in the whole sequences, window, scaling.

        Returns:
            [B, l, H, width of the values], and None for the attention weights.
        """
        num_heads, num_slices = query.shape[1], self.num_slices
        check_heads(num_heads, num_slices)
        copies = num_slices // math.gcd(key.shape[1], num_slices)
        key, value = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key, value))
        whole = (self._exchange(x.transpose(1, 2), to_heads=True).transpose(1, 2) for x in (query, key, value))
        if s_aux is not None:
            rank = 0 if self.group is None else dist.get_rank(self.group)
            kwargs["s_aux"] = s_aux.view(num_slices, -1)[rank]
        out, _ = ALL_ATTENTION_FUNCTIONS[self.attention](module, *whole, attention_mask, **kwargs)
        return self._exchange(out, to_heads=False), None

    def _exchange(self, x: Tensor, to_heads: bool) -> Tensor:
        exchanged: Tensor = _Exchange.apply(x, self.num_slices, self.group, to_heads)  # type: ignore[no-untyped-call]
        return exchanged


def check_heads(num_heads: int, num_slices: int) -> None:
    """Refuse a number of slices that heads can't be divided by.

    Raises:
        ConfigError: `distributed.context_parallel` does not divide the heads.
    """
    if num_heads % num_slices == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
    reason = f"does not divide the model's {num_heads} attention heads, of which each rank gets as many."
    fix = f"Set distributed.context_parallel to one of {divisors}."
    raise ConfigError([Problem(f"distributed.context_parallel={num_slices}", reason, fix)])


class _Exchange(torch.autograd.Function):
    """[B, l, H, D] -> [B, L, h, D], to heads, or the other way, to tokens. The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_slices: int, group: dist.ProcessGroup | None, to_heads: bool) -> Tensor:
        ctx.num_slices = num_slices
        ctx.group = group
        ctx.to_heads = to_heads
        return _to_heads(x, num_slices, group) if to_heads else _to_tokens(x, num_slices, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(grads[0], ctx.num_slices, ctx.group), None, None, None


def _to_heads(x: Tensor, num_slices: int, group: dist.ProcessGroup | None) -> Tensor:
    """[B, l, H, D] -> [B, L, h, D]; what comes from a rank is its slice."""
    parts = x.unflatten(2, (num_slices, -1)).movedim(2, 0)  # [N, B, l, h, D]
    return _all_to_all(parts, group).movedim(0, 1).flatten(1, 2)  # no copy of a single sequence


def _to_tokens(x: Tensor, num_slices: int, group: dist.ProcessGroup | None) -> Tensor:
    """[B, L, h, D] -> [B, l, H, D]; what comes from a rank are its heads."""
    parts = x.unflatten(1, (num_slices, -1)).movedim(1, 0)  # [N, B, l, h, D]
    return _all_to_all(parts, group).movedim(0, 2).flatten(2, 3)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send `parts[n]` to the n-th rank of the group, and get what each has for this one. On meta nothing is sent."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    if not parts.is_meta:
        dist.all_to_all_single(received, parts, group=group)
    return received
