"""Attention over slots, compared with that of float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.triton_slots import attend


class Heads(NamedTuple):
    """Shapes of a layer's attention, and what it does with logits."""

    key_heads: int
    groups: int
    key_size: int = 64
    value_size: int = 64
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


def distance(
    heads: Heads,
    positions: list[int],
    length: int,
    num_parts: int | None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """The distance of the kernel's output from that of float64, as a part of its norm.

    Keys and values that no query sees are NaN.

    Args:
        heads: of the layer.
        positions: where each slot's query is.
        length: of slots.
        num_parts: programs that share a text's keys.
        device: a GPU, or Triton's interpreter computes.
        dtype: of queries, keys and values.
    """
    torch.manual_seed(0)
    num_slots, num_queries = len(positions), heads.key_heads * heads.groups
    keys = torch.randn(num_slots, heads.key_heads, length, heads.key_size, device=device).to(dtype)
    values = torch.randn(num_slots, heads.key_heads, length, heads.value_size, device=device).to(dtype)
    # As models hand them over: tokens before heads.
    query = torch.randn(num_slots, 1, num_queries, heads.key_size, device=device).to(dtype).transpose(1, 2)[:, :, 0]
    sinks = torch.randn(num_queries, device=device).to(dtype) if heads.has_sinks else None
    scale = heads.key_size**-0.5
    places = torch.tensor(positions, device=device)
    expected = _expected(heads, query, keys, values, places, scale, sinks)
    for slot, position in enumerate(positions):
        keys[slot, :, position + 1 :] = float("nan")
        values[slot, :, position + 1 :] = float("nan")
    found = attend(query, keys, values, places, scale, heads.window, heads.softcap, sinks, num_parts)
    return float((found.double() - expected).norm() / expected.norm())


def _expected(
    heads: Heads, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention as it is written in books, in float64."""
    keys = keys.double().repeat_interleave(heads.groups, 1)
    values = values.double().repeat_interleave(heads.groups, 1)
    logits = (query.double()[:, :, None] @ keys.mT)[:, :, 0] * scale
    if heads.softcap is not None:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    ago = positions[:, None] - torch.arange(keys.shape[2], device=keys.device)
    sees = ago >= 0
    if heads.window is not None:
        sees &= ago < heads.window
    logits = logits.masked_fill(~sees[:, None], float("-inf"))
    if sinks is not None:
        beside = sinks.double()[None, :, None].expand(*logits.shape[:2], 1)
        logits = torch.cat([logits, beside], -1)
    shares = logits.softmax(-1)[..., : keys.shape[2]]
    return (shares[:, :, None] @ values)[:, :, 0]
