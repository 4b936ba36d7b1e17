"""The sizes by which a micro-batch finds the CUDA graph that can compute it (captured.py).

A graph computes tensors of fixed sizes. Numbers and lengths of rows differ from micro-batch to micro-batch, so they are
rounded up, and all micro-batches with the same rounded sizes share a graph.

A run that repeats to the bit rounds up in the same way even if nothing is recorded. How attention's backward divides a
sum depends on the number of rows, and rows without tokens count too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.data.batch import Batch

MIN_ROWS, MIN_LONGEST, STEP = 16, 128, 4  # rows and lengths are rounded up to these times a power of STEP


class Key(NamedTuple):
    """The sizes that a graph is recorded for.

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
