"""A Triton kernel for attention over slots: one query a text, keys and values only as far as the text has come.

Imported on GPUs only. A slot has room for the longest text, and most texts are shorter. torch's attention reads every
slot to its end, and multiplies what a mask hides by 0. Here a program reads the keys of one text and one key head from
the first one that its query sees to the last, and the others are never asked for. The query heads that share a key head
are the rows of its products.

Where there are fewer programs than a GPU has room for, a text's keys are shared by several of them (Flash-Decoding,
https://pytorch.org/blog/flash-decoding/): each leaves its largest logit, its sum and its output, and a second kernel
joins them.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MIN_ROWS = 16  # of a product on tensor cores
MAX_PARTS = 16
PART_KEYS = 512  # of a text, at least, that a program of several reads: with fewer, joining takes longer than reading
PROGRAMS = 4  # for each multiprocessor, with which it is busy


class SlotTile(NamedTuple):
    """How a program reads keys.

    Attributes:
        keys: at a time.
        num_warps: of a program.
        num_stages: blocks of keys and values that are on their way at a time.
    """

    keys: int
    num_warps: int
    num_stages: int


def slot_tile(key_size: int, value_size: int) -> SlotTile:
    """The tile for heads of this many values: a block of keys and one of values are up to 32 KiB."""
    size = triton.next_power_of_2(max(key_size, value_size))
    if size <= 128:
        return SlotTile(64, 4, 2)
    if size == 256:
        return SlotTile(32, 4, 2)
    return SlotTile(16, 4, 2)


@kernel
@triton.jit
def _attend_kernel(
    query, keys, values, positions, sinks, out, tops, sums,
    num_heads, groups, length, query_stride, query_head_stride, key_size, value_size, window, scale, softcap,
    GROUPS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The queries of one text and one key head, with all keys that they see, or with a part of these."""
    log2_e: tl.constexpr = 1.4426950408889634
    slot = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    part = tl.program_id(1)
    end = (tl.load(positions + slot) + 1).to(tl.int32)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(end - window, 0)
    first_block = start // KEYS
    num_blocks = tl.cdiv(end, KEYS) - first_block
    first = first_block + part * num_blocks // PARTS
    last = first_block + (part + 1) * num_blocks // PARTS

    group = tl.arange(0, GROUPS)
    in_key = tl.arange(0, KEY_SIZE)
    in_value = tl.arange(0, VALUE_SIZE)
    is_group = group < groups
    query_places = query + slot.to(tl.int64) * query_stride + (head * groups + group)[:, None] * query_head_stride
    is_query = is_group[:, None] & (in_key < key_size)[None, :]
    q = tl.load(query_places + in_key[None, :], mask=is_query, other=0.0)
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    summed = tl.zeros([GROUPS, VALUE_SIZE], tl.float32)
    if HAS_SINKS:  # the first part has a logit that belongs to no key
        sink = tl.load(sinks + head * groups + group, mask=is_group, other=0.0).to(tl.float32) * log2_e
        top = tl.where(part == 0, sink, top)
        total = tl.where(part == 0, 1.0, total)
    before = tl.program_id(0).to(tl.int64) * length
    key_places = keys + before * key_size
    value_places = values + before * value_size
    for block in tl.range(first, last):
        row = block * KEYS + tl.arange(0, KEYS)
        is_seen = row < end
        # Transposed where it is loaded: the sum runs over the first dimension of a product's second factor.
        k = tl.load(
            key_places + row[None, :] * key_size + in_key[:, None],
            mask=is_seen[None, :] & (in_key < key_size)[:, None],
            other=0.0,
        )
        v = tl.load(
            value_places + row[:, None] * value_size + in_value[None, :],
            mask=is_seen[:, None] & (in_value < value_size)[None, :],
            other=0.0,
        )
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_CAP:
            ratio = logits / softcap
            logits = softcap * (2.0 / (1.0 + tl.exp2(-2.0 * log2_e * ratio)) - 1.0)  # tanh
        logits *= log2_e
        if HAS_WINDOW:
            is_seen &= row >= start
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shares = tl.exp2(logits - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(shares, 1)
        summed = tl.dot(shares.to(v.dtype), v, summed * kept[:, None], input_precision="ieee")
        top = new_top
    place = tl.program_id(0).to(tl.int64) * groups + group
    is_value = is_group[:, None] & (in_value < value_size)[None, :]
    if PARTS == 1:
        summed /= total[:, None]
        out_places = out + place[:, None] * value_size + in_value[None, :]
        tl.store(out_places, summed.to(out.dtype.element_ty), mask=is_value)
    else:
        place = place * PARTS + part
        tl.store(tops + place, top, mask=is_group)
        tl.store(sums + place, total, mask=is_group)
        tl.store(out + place[:, None] * value_size + in_value[None, :], summed, mask=is_value)


@kernel
@triton.jit
def _join_kernel(parts, tops, sums, out, value_size, PARTS: tl.constexpr, VALUE_SIZE: tl.constexpr):
    """One query's output, of what the parts of its keys have given. A part without keys has a largest logit of -inf."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    in_value = tl.arange(0, VALUE_SIZE)
    is_value = in_value < value_size
    top = tl.load(tops + place * PARTS + part)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + place * PARTS + part) * weight, 0)
    places = parts + (place * PARTS + part)[:, None] * value_size + in_value[None, :]
    summed = tl.sum(tl.load(places, mask=is_value[None, :], other=0.0) * weight[:, None], 0)
    tl.store(out + place * value_size + in_value, (summed / total).to(out.dtype.element_ty), mask=is_value)


def attend(
    query_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_parts: int | None = None,
    tile: SlotTile | None = None,
) -> Tensor:
    """Attention of one query a text and head, [B, H, V] in the dtype of the values.

    Args:
        query_BHD: of each slot. H is a multiple of the key heads.
        keys: [B, key heads, length, D], contiguous.
        values: [B, key heads, length, V], contiguous.
        positions: int64 [B], the place of each slot's last key that its query sees.
        scale: factor of the logits.
        window: how many keys a query sees, its own included; None for all.
        softcap: what logits are capped at; None for no cap.
        sinks: [H], a logit of every query that belongs to no key; None without.
        num_parts: programs that share a text's keys, a power of two; None for as many as `best_parts` says.
        tile: how a program reads keys; None for `slot_tile`.
    """
    num_slots, num_heads, length, key_size = keys.shape
    value_size = values.shape[3]
    num_queries = query_BHD.shape[1]
    parts = num_parts or best_parts(num_slots * num_heads, length if window is None else window, query_BHD.device)
    tile = tile or slot_tile(key_size, value_size)
    groups = num_queries // num_heads
    if query_BHD.stride(2) != 1:
        query_BHD = query_BHD.contiguous()
    out = values.new_empty(num_slots, num_queries, value_size)
    partial, tops, sums = out, out, out
    if parts > 1:
        partial = out.new_empty(num_slots, num_queries, parts, value_size, dtype=torch.float32)
        tops = out.new_empty(num_slots, num_queries, parts, dtype=torch.float32)
        sums = torch.empty_like(tops)
    padded_value = triton.next_power_of_2(value_size)
    _attend_kernel[(num_slots * num_heads, parts)](
        query_BHD,
        keys,
        values,
        positions,
        query_BHD if sinks is None else sinks,
        partial,
        tops,
        sums,
        num_heads,
        groups,
        length,
        query_BHD.stride(0),
        query_BHD.stride(1),
        key_size,
        value_size,
        window or 0,
        scale,
        softcap or 1.0,
        GROUPS=max(MIN_ROWS, triton.next_power_of_2(groups)),
        KEY_SIZE=max(16, triton.next_power_of_2(key_size)),
        VALUE_SIZE=max(16, padded_value),
        KEYS=tile.keys,
        PARTS=parts,
        HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if parts > 1:
        grid = (num_slots * num_queries,)
        _join_kernel[grid](partial, tops, sums, out, value_size, PARTS=parts, VALUE_SIZE=padded_value, num_warps=2)
    return out


def best_parts(num_programs: int, num_keys: int, device: torch.device) -> int:
    """How many programs share a text's keys, a power of two: where there are few texts, and these may be long."""
    if device.type != "cuda":
        return 1
    wanted = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // num_programs
    found = min(MAX_PARTS, max(1, wanted), max(1, num_keys // PART_KEYS))
    return 1 << (found.bit_length() - 1)
