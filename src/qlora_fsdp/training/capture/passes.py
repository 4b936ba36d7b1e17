"""Forward and backward of a micro-batch, each kernel queued by Python. `captured.py` replays them as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.sharding.shard import set_gradient_sync
from qlora_fsdp.training.capture.batch_key import Key, with_room
from qlora_fsdp.training.memory_use import PhasePeaks


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
        self.model, self.device, self.peaks, self.deterministic = model, device, peaks, deterministic
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
