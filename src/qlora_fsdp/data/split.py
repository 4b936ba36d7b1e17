"""How the sequences of a run are divided into optimizer steps, and a step into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.config.specs import StepSpec


@dataclass(frozen=True)
class BatchSplit:
    """How the data is cut into steps, and a step into micro-batches.

    Attributes:
        micro_batch_size: sequences of a forward pass of a group.
        global_batch_size: sequences an optimizer step, over all ranks.
        num_groups: groups of ranks that share a step; those of a group have the same sequences.
        num_steps: optimizer steps of the run.
        num_sequences: sequences the run trains on, repeated ones counted again.
        num_slices: ranks of a group, each of which has a slice of every sequence (`distributed.context_parallel`).
    """

    micro_batch_size: int
    global_batch_size: int
    num_groups: int
    num_steps: int
    num_sequences: int
    num_slices: int = 1

    def num_micro_batches(self, num_sequences: int) -> int:
        """Forward passes of each rank for a step of `num_sequences`."""
        return math.ceil(num_sequences / (self.num_groups * self.micro_batch_size))

    def groups_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The group of ranks that computes each sequence of a run, by its number in the run's order."""
        return sequences % self.global_batch_size // self.micro_batch_size % self.num_groups


def split_batches(spec: StepSpec, num_ranks: int, num_sequences: int) -> BatchSplit:
    """The split for a data set of `num_sequences` sequences; the last step of the run may be short."""
    size = spec.global_batch_size
    if spec.max_steps is not None:
        total = spec.max_steps * size
    else:
        total = max(1, round(spec.num_epochs * num_sequences * spec.num_iterations))
    num_groups = num_ranks // spec.num_slices
    num_steps = math.ceil(total / size)
    return BatchSplit(spec.micro_batch_size, size, num_groups, num_steps, total, spec.num_slices)
