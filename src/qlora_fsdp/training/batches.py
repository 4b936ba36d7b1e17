"""Which sequences each optimizer step trains on, and the micro-batches that a rank makes of them.

Every rank knows the order of the whole data and the length of every sequence. So each of them knows how many tokens a
step has, over all ranks, before the first micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from qlora_fsdp.data.batch import Batch, collate, micro_batch_indices
from qlora_fsdp.data.sequences import Indices, Sequences, TrainingData
from qlora_fsdp.data.split import BatchSplit


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step trains on, over all ranks and micro-batches.

    Attributes:
        step: optimizer steps done before this one.
        epoch: how often the whole data has been seen after this step; None of a stream, whose length nobody knows.
        indices: its sequences.
        num_tokens: tokens in them.
        num_targets: tokens with a loss in them, which the step's loss is divided by.
        num_micro_batches: forward passes of each rank.
        figures: what is known of it before its passes, by name.
    """

    step: int
    epoch: float | None
    indices: Indices
    num_tokens: int
    num_targets: int
    num_micro_batches: int
    figures: Mapping[str, float] = field(default_factory=dict)


class GlobalBatches:
    """The global batches of a run, in order.

    Args:
        data: all of it, on every rank.
        split: how the sequences of a step spread over ranks and micro-batches.
        seed: decides the order.
        rank: whose micro-batches `micro_batches` makes, of whole sequences or of its slice of each.
    """

    def __init__(self, data: TrainingData, split: BatchSplit, seed: int, rank: int) -> None:
        self.data = data
        self.split = split
        self.seed = seed
        self.rank = rank

    def of_step(self, step: int) -> GlobalBatch:
        """The global batch of a step; 0 is the first one."""
        indices = self._indices(step)
        num_seen = step * self.split.global_batch_size + len(indices)
        return GlobalBatch(
            step=step,
            epoch=num_seen / len(self.data) if isinstance(self.data, Sequences) else None,
            indices=indices,
            num_tokens=self.data.num_tokens(indices),
            num_targets=self.data.num_target_tokens(indices),
            num_micro_batches=self.split.num_micro_batches(len(indices)),
        )

    def seed_dropout(self, step: int) -> None:
        """Seed torch from seed, step and rank, so that a resumed run draws the same dropout masks."""
        seed = np.random.SeedSequence([self.seed, step, self.rank]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(seed))

    def micro_batches(self, first_step: int) -> Iterator[Batch]:
        """This rank's micro-batches of `first_step` and of all steps after it, one after another."""
        for step in range(first_step, self.split.num_steps):
            yield from micro_batches_of(self.data, self._indices(step), self.split, self.rank)

    def _indices(self, step: int) -> Indices:
        """The next `global_batch_size` sequences; the last step of a run may have fewer."""
        first = step * self.split.global_batch_size
        return self.data.order(first, min(first + self.split.global_batch_size, self.split.num_sequences), self.seed)


def micro_batches_of(data: TrainingData, indices: Indices, split: BatchSplit, rank: int) -> Iterator[Batch]:
    """A rank's micro-batches of the sequences `indices`, as tensors on the CPU."""
    size, num_slices = split.micro_batch_size, split.num_slices
    group, index = divmod(rank, num_slices)
    for micro in micro_batch_indices(indices, rank=group, num_ranks=split.num_groups, micro_batch_size=size):
        batch = collate(data, micro, micro_batch_size=size, num_slices=num_slices)
        yield batch if num_slices == 1 else batch.slice(index, num_slices)
