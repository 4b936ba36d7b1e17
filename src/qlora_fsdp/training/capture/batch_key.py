"""The sizes by which a micro-batch finds the CUDA graph that can compute it (captured.py).

A graph computes tensors of fixed sizes. Numbers and lengths of rows differ from micro-batch to micro-batch, so they are
rounded up, and all micro-batches with the same rounded sizes share a graph.

A run that repeats to the bit rounds up in the same way even if nothing is recorded. How attention's backward divides a
sum depends on the number of rows, and rows without tokens count too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from qlora_fsdp.data.batch import Batch

MIN_ROWS, MIN_LONGEST, STEP = 16, 128, 4  # rows and lengths are rounded up to these times a power of STEP
OF_TOKENS = ("input_ids", "targets", "position_ids", "num_tokens")
OF_ANSWERS = ("is_good", "margins", "reference")
OF_LABELS = ("labels", "label_positions")


class Key(NamedTuple):
    """The sizes that a graph is recorded for.

    Attributes:
        size: sequences of the micro-batch.
        length: tokens of each.
        num_rows: rows that there is room for; 0 if each sequence is one row.
        longest: tokens that a row may have.
        num_answers: answers that there is room for, as many as rows; where each sequence is one row, how many there
            are; 0 where none are compared.
        num_labels: labels that there is room for; 0 where tokens are predicted.
    """

    size: int
    length: int
    num_rows: int
    longest: int
    num_answers: int = 0
    num_labels: int = 0

    @classmethod
    def of(cls, batch: Batch) -> Key:
        """The key of a micro-batch."""
        size, length = batch.input_ids.shape
        num_rows = len(batch.sequence_starts) - 1
        if num_rows == size:
            num_labels = 0 if batch.labels is None else _round_up(len(batch.labels), MIN_ROWS)
            return cls(size, length, 0, batch.whole_length, batch.num_answers, num_labels)
        num_rows = _round_up(num_rows, MIN_ROWS)
        longest = min(batch.whole_length, _round_up(batch.max_row_length, MIN_LONGEST))
        return cls(size, length, num_rows, longest, num_rows if batch.num_answers else 0)


def with_room(batch: Batch, key: Key, device: torch.device) -> Batch:
    """The micro-batch on `device`, with room for as many rows and answers, and as long rows, as its key has."""
    moved = replace(batch.to(device), max_row_length=key.longest)
    if not key.num_rows and not key.num_labels:
        return moved
    room: dict[str, Any] = {}
    if key.num_labels:
        room["is_label"] = torch.empty(key.num_labels, dtype=torch.bool, device=device)
        for name in OF_LABELS:
            value = getattr(moved, name)
            room[name] = value.new_zeros(key.num_labels, *value.shape[1:])
    if key.num_rows:
        room["sequence_starts"] = torch.empty(key.num_rows + 1, dtype=torch.int32, device=device)
    if key.num_rows and key.num_answers:
        room["is_answer"] = torch.empty(key.num_answers, dtype=torch.bool, device=device)
        for name in OF_ANSWERS:
            value = getattr(moved, name)
            if value is not None:  # of each answer or of each pair
                num = len(value) * key.num_answers // batch.num_answers
                room[name] = value.new_zeros(num, *value.shape[1:])
    roomy = replace(moved, num_answers=key.num_answers, **room)
    fill(roomy, batch)
    return roomy


def fill(roomy: Batch, batch: Batch) -> None:
    """Write a micro-batch into the tensors of one with room for it.

    What is left of the starts of rows are rows without tokens, at the end; what is left of answers and of labels is
    marked as none.
    """
    for name in (*OF_TOKENS, *OF_ANSWERS, *OF_LABELS):
        value = getattr(batch, name)
        if value is not None:
            getattr(roomy, name)[: len(value)].copy_(value, non_blocking=True)
    if len(roomy.sequence_starts) > len(roomy.input_ids) + 1:
        roomy.sequence_starts.fill_(len(batch.input_ids) * batch.whole_length)
    roomy.sequence_starts[: len(batch.sequence_starts)].copy_(batch.sequence_starts, non_blocking=True)
    if roomy.is_label is not None and batch.labels is not None:
        roomy.is_label.fill_(False)
        roomy.is_label[: len(batch.labels)].fill_(True)
    if roomy.is_answer is not None:
        roomy.is_answer.fill_(False)
        roomy.is_answer[: batch.num_answers].fill_(True)


def _round_up(number: int, smallest: int) -> int:
    rounded = smallest
    while rounded < number:
        rounded *= STEP
    return rounded
