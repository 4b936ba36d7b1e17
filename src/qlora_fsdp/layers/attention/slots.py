"""Attention for generating several texts at once, each with its keys and values in a slot of fixed memory.

A slot has room for the keys and values of the longest text. In a step every row has one query, at its own position in
its own text. It sees the keys of its slot up to that position and within the layer's window. So the position of each
row is all that masking needs, and nothing is padded. Whatever a slot holds after its row's position is not seen, and
is overwritten as the text grows. On a GPU it is not read either (kernels/triton_slots.py).

While a prompt is read, queries see the keys of the same call, from the first token on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from qlora_fsdp.layers.kernels.launch import has_tensor_cores

SLOTS = "qlora_fsdp_slots"
QUERY_BLOCK = 1024  # queries of a prompt that are computed at a time where a mask or all logits are needed


class Step:
    """One call of the model: where its rows' keys and values go, and what their queries see.

    Tensors that all layers need are made once, by the first layer that asks.

    Args:
        positions: int64 [num_slots], where the one new token of each slot goes; None where prompts are read.
        slots: int64 [rows], the slots of the prompts that are read; None if nothing is kept of them.
        branches: int64 [rows, tokens], where prompts that are read have several ends: 0 for what all ends of a row
            share, and a number for each end, which sees that and itself; None where they have one.
        places: int64 [rows, tokens], the positions of these tokens.
    """

    def __init__(
        self,
        positions: Tensor | None = None,
        slots: Tensor | None = None,
        branches: Tensor | None = None,
        places: Tensor | None = None,
    ) -> None:
        self.positions = positions
        self.slots = slots
        self.branches = branches
        self.branch_places = places
        self._places: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    def places(self, num_heads: int, length: int) -> Tensor:
        """Where the new tokens lie among the rows of [num_slots, num_heads, length] that are flattened."""
        assert self.positions is not None
        key = (num_heads, length)
        if key not in self._places:
            rows = torch.arange(len(self.positions) * num_heads, device=self.positions.device) * length
            self._places[key] = rows + self.positions.repeat_interleave(num_heads)
        return self._places[key]

    def mask(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask added to logits, [num_slots, 1, 1, length]: 0 for keys that a row sees, -inf for the others."""
        assert self.positions is not None
        if window is not None and window >= length:
            window = None
        key = (length, window, dtype)
        if key not in self._masks:
            ago = self.positions[:, None] - torch.arange(length, device=self.positions.device)
            sees = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
            hidden = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))
            self._masks[key] = hidden[:, None, None]
        return self._masks[key]

    def branch_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask added to logits of prompts with several ends: [rows, 1, tokens, tokens]."""
        assert self.branches is not None and self.branch_places is not None
        length = self.branches.shape[1]
        key = (length, window, dtype)
        if key not in self._masks:
            of_key, of_query = self.branches[:, None, :], self.branches[:, :, None]
            sees = ((of_key == 0) | (of_key == of_query)).tril()
            if window is not None:
                sees &= self.branch_places[:, :, None] - self.branch_places[:, None, :] < window
            hidden = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))
            self._masks[key] = hidden[:, None]
        return self._masks[key]


_running: ContextVar[Step | None] = ContextVar("running_step", default=None)


@contextmanager
def running(step: Step) -> Iterator[None]:
    """While it lasts, caches and attention belong to this call."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def running_step() -> Step:
    """The call that runs."""
    step = _running.get()
    assert step is not None, "the slots' attention was called outside of a step"
    return step


def register() -> None:
    """Put the attention into transformers' registry. It has no mask there, so that models make none."""
    AttentionInterface.register(SLOTS, attend_in_slots)


# transformers calls every attention function with these parameters.
def attend_in_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row to its own slot, or of a prompt to itself.

    Args:
        module: the attention layer that calls.
        query: [B, H, L, D]; in a step L is 1, and B are all slots.
        key: [B, H_kv, K, D]: whole slots in a step, the prompt's own keys otherwise. H is a multiple of H_kv.
        value: like `key`.
        attention_mask: not used; the running `Step` knows.
        dropout: not used: nothing is dropped while text is generated.
        scaling: factor of the logits; None for 1 / sqrt(D).
        sliding_window: how many tokens a query sees, itself included; None for all before it.
        softcap: what logits are capped at; None for no cap.
        s_aux: [H], a logit beside each row's that belongs to no token (gpt-oss); None without.
        **kwargs: what transformers passes to other kernels; not used.

    Returns:
        [B, L, H, D], and None for the attention weights.
    """
    step, scale = running_step(), query.shape[-1] ** -0.5 if scaling is None else scaling
    is_plain = softcap is None and s_aux is None
    if step.positions is None:
        seen = None if step.branches is None else step.branch_mask(sliding_window, query.dtype)
        return _attend_to_prompt(query, key, value, scale, sliding_window, softcap, s_aux, seen), None
    if query.dtype != torch.float32 and has_tensor_cores(query.device):
        from qlora_fsdp.layers.kernels import triton_slots

        out = triton_slots.attend(
            query[:, :, 0], key, value, step.positions, scale, sliding_window, softcap, sinks=s_aux
        )
        return out[:, None], None
    mask = step.mask(key.shape[2], sliding_window, query.dtype)
    # The query heads that share a key head become its queries, so that keys are read once and copied nowhere.
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    if is_plain:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        sinks = None if s_aux is None else s_aux.view(1, key.shape[1], -1, 1)
        out = _plain(grouped, key, value, mask, scale, softcap, sinks)
    return out.reshape(query.shape[0], 1, query.shape[1], value.shape[-1]), None


def _attend_to_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """[B, L, H, D] of queries that see the keys of the same call: those before them, or what a mask says."""
    length, num_groups = query.shape[2], query.shape[1] // key.shape[1]
    is_plain = softcap is None and s_aux is None
    if is_plain and mask is None and (window is None or window >= length):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=num_groups > 1)
        return out.transpose(1, 2)
    key = key.repeat_interleave(num_groups, 1)
    value = value.repeat_interleave(num_groups, 1)
    positions = torch.arange(length, device=query.device)
    blocks: list[Tensor] = []
    window = length if window is None else window
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = max(0, start - window + 1) if mask is None else 0
        if mask is None:
            ago = positions[start:end, None] - positions[first:end]
            seen = torch.zeros(ago.shape, dtype=query.dtype, device=query.device)
            seen.masked_fill_((ago < 0) | (ago >= window), float("-inf"))
        else:
            seen = mask[:, :, start:end, :end]
        q = query[:, :, start:end]
        k = key[:, :, first:end]
        v = value[:, :, first:end]
        if is_plain:
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))
        else:
            sinks = None if s_aux is None else s_aux.view(1, -1, 1, 1)
            blocks.append(_plain(q, k, v, seen, scale, softcap, sinks))
    return torch.cat(blocks, 2).transpose(1, 2)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, as transformers' eager attention computes it: softmax in float32.

    Args:
        query: [B, H, L, D].
        key: [B, H, K, D].
        value: like `key`.
        mask: added to the logits [B, H, L, K].
        scale: factor of the logits.
        softcap: see `attend_in_slots`.
        sinks: a further logit of every query, which broadcasts to [B, H, L, 1].
    """
    logits = (query @ key.mT) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1).to(logits.dtype)], -1)
    shares = F.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)
    return (shares if sinks is None else shares[..., :-1]) @ value
