"""Forward and backward of a micro-batch, each kernel queued by Python. `captured.py` replays them as one CUDA graph.

The sizes by which a micro-batch finds the CUDA graph that can compute it (captured.py).

A graph computes tensors of fixed sizes. Numbers and lengths of rows differ from micro-batch to micro-batch, so they are
rounded up, and all micro-batches with the same rounded sizes share a graph.

A run that repeats to the bit rounds up in the same way even if nothing is recorded. How attention's backward divides a
sum depends on the number of rows, and rows without tokens count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.sharding.shard import set_gradient_sync
from qlora_fsdp.training.memory_use import PhasePeaks

# rows and lengths are rounded up to these times a power of STEP
MIN_ROWS = 16
MIN_LONGEST = 128
STEP = 4
OF_TOKENS = ("input_ids", "targets", "position_ids", "num_tokens")
OF_ANSWERS = ("is_good", "margins", "reference")
OF_LABELS = ("labels", "label_positions")


class Passes(Protocol):
    """Forward and backward of the micro-batches of a step, one after another. All ranks call it together.

    Attributes:
        are_replayed: whether micro-batches are replayed as graphs, which the host queues faster than a GPU computes.
    """

    @property
    def are_replayed(self) -> bool: ...

    def announced(self, micro_batches: Iterator[Batch]) -> Iterator[Batch]:
        """The micro-batches of all steps, in the order in which `run` gets them. It may see some ahead of that."""

    def begin_step(self, num_targets: int) -> None:
        """Prepare for the micro-batches of a step, whose losses are divided by `num_targets`."""

    def run(self, batch: Batch, is_last: bool) -> Tensor:
        """Queue forward and backward of a micro-batch, and return its part of the step's loss.

        Args:
            batch: on the host, in page-locked memory where there is a GPU.
            is_last: whether this is the step's last micro-batch.

        Returns:
            A float32 scalar on the device, without a graph.
        """

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients, which the optimizer has used. Called while the GPU works."""

    def evaluate(self, batch: Batch) -> Tensor:
        """Queue the forward of held-out rows, and return the sum of their losses, as `run` does; without gradients."""

    def close(self) -> None:
        """Give back what the passes hold on the device. No pass may follow. Every rank calls it before it parts."""


def place(batch: Batch, device: torch.device, deterministic: bool) -> Batch:
    """The micro-batch on the device, laid out as a training pass needs it; see `EagerPasses`.

    Passes of a preference's reference have the same layout, because attention rounds differently if it is told of
    longer rows.
    """
    has_room = deterministic or (batch.num_answers > 0 and device.type == "cuda")
    return with_room(batch, Key.of(batch), device) if has_room else batch.to(device)


class EagerPasses:
    """Queues kernel by kernel. Gradients are summed over ranks in the last micro-batch's backward.

    In a deterministic run it must make no difference which micro-batches were recorded, because a resumed run records
    others. So its micro-batches are laid out as recorded ones are, and each sums its gradients over ranks.

    Args:
        model: sharded, loaded and proven.
        device: where it computes.
        peaks: measures the memory of each phase.
        deterministic: `training.deterministic`.
    """

    are_replayed = False

    def __init__(self, model: TaskModel, device: torch.device, peaks: PhasePeaks, deterministic: bool = False) -> None:
        self.model = model
        self.device = device
        self.peaks = peaks
        self.deterministic = deterministic
        self.num_targets = 1

    def announced(self, micro_batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches."""
        return micro_batches

    def begin_step(self, num_targets: int) -> None:
        """Losses are divided by `num_targets` from now on."""
        self.num_targets = num_targets

    def run(self, batch: Batch, is_last: bool) -> Tensor:
        """Queue forward and backward, and return the loss."""
        set_gradient_sync(self.model, enabled=is_last or self.deterministic)
        self.peaks.enter("forward")
        loss = self.evaluate(batch) / self.num_targets
        self.peaks.enter("backward")
        loss.backward()
        return loss.detach()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients; the next backward makes new ones."""
        optimizer.zero_grad(set_to_none=True)

    def evaluate(self, batch: Batch) -> Tensor:
        """Queue forward, and return the sum of the losses."""
        loss: Tensor = self.model(self.model.with_reference(place(batch, self.device, self.deterministic)))
        return loss

    def close(self) -> None:
        """Nothing is held."""


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
