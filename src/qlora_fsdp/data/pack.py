"""Put rows together into packs of at most `capacity` tokens, by best-fit decreasing. Stage 6 (sequences) uses this.

Long rows come first, and each row goes into the fullest open pack that still has room for it. One Python integer keeps
the rooms: its bit s is set if a pack with room for s tokens is open. Shifted by the row's length, its lowest bit is the
best fit. A million rows take about a second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], capacity: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assigns each row to a pack. Rows are kept whole.

    Args:
        lengths: [num_rows], tokens of each row, from 1 to `capacity`.
        capacity: tokens per pack, at most.
        seed: decides which of several rows of the same length go together.

    Returns:
        row_ids: [num_rows], the rows ordered by pack.
        starts: [num_packs + 1], where packs begin in `row_ids`, and num_rows at the end.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]

    open_packs: list[list[int]] = [[] for _ in range(capacity)]  # by the room that is left in them
    rooms = 0
    num_packs = 0
    packs: list[int] = []  # the pack of each row in `order`
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = open_packs[room].pop()
            if not open_packs[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, num_packs
            num_packs += 1
        packs.append(chosen)
        if left := room - length:
            open_packs[left].append(chosen)
            rooms |= 1 << left

    by_pack = np.argsort(packs, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(packs, minlength=num_packs))]).astype(np.int64)
    return order[by_pack], starts
