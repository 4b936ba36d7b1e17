"""What micro-batches have in common that one CUDA graph can compute (captured.py): sizes, with numbers rounded up.

A run that repeats to the bit gives all its micro-batches the same room, recorded or not: how attention's backward
divides a sum depends on the number of rows, those without tokens included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.data.batch import Batch

MIN_ROWS, MIN_LONGEST, STEP = 16, 128, 4  # rows and lengths are rounded up to these times a power of STEP


class Key(NamedTuple):
    """What a graph is recorded for.

    Attributes:
        size: sequences of the micro-batch.
        length: tokens of each.
        num_rows: rows that there is room for; 0 if each sequence is one row.
        longest: tokens that a row may have.
    """

    size: int
    length: int
    num_rows: int
    longest: int

    @classmethod
    def of(cls, batch: Batch) -> Key:
        """The key of a micro-batch."""
        size, length = batch.input_ids.shape
        num_rows = len(batch.sequence_starts) - 1
        if num_rows == size:
            return cls(size, length, 0, batch.whole_length)
        longest = _round_up(batch.max_row_length, MIN_LONGEST)
        return cls(size, length, _round_up(num_rows, MIN_ROWS), min(batch.whole_length, longest))

    def holds(self, other: Key) -> bool:
        """Whether a graph of this key can compute a micro-batch of the other."""
        is_packed = (self.num_rows > 0) == (other.num_rows > 0)
        has_room = self.num_rows >= other.num_rows and self.longest >= other.longest
        return self[:2] == other[:2] and is_packed and has_room


def with_room(batch: Batch, key: Key, device: torch.device) -> Batch:
    """The micro-batch on `device`, with room for as many rows, and as long ones, as its key has."""
    moved = replace(batch.to(device), max_row_length=key.longest)
    if not key.num_rows:
        return moved
    starts = torch.empty(key.num_rows + 1, dtype=torch.int32, device=device)
    fill_starts(starts, batch)
    return replace(moved, sequence_starts=starts)


def fill_starts(starts: Tensor, batch: Batch) -> None:
    """Write where rows start. What is left of the tensor are rows without tokens, at the end."""
    starts.fill_(len(batch.input_ids) * batch.whole_length)
    starts[: len(batch.sequence_starts)].copy_(batch.sequence_starts, non_blocking=True)


def _round_up(number: int, smallest: int) -> int:
    rounded = smallest
    while rounded < number:
        rounded *= STEP
    return rounded
