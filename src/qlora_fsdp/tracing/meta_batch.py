"""The micro-batch that a trace runs: tensors on meta of the largest shapes that a run's settings allow."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import assert_never

from qlora_fsdp.config.schema import TaskName
from qlora_fsdp.config.specs import BatchSpec
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.labels import label_width


def batch_on_meta(spec: BatchSpec, num_positions: int | None = None) -> Batch:
    """A rank's largest micro-batch, on meta. Each sequence has two rows, or one where rows are padded.

    Args:
        spec: its size and the lengths of its sequences.
        num_positions: those that the model has embeddings for, if it has such a table. No row is longer.
    """
    task = spec.task
    size = spec.size
    length = spec.slice_length
    if task.has_pairs and not spec.packs_rows:
        size = 2 * spec.size
        length = spec.max_length
    if not spec.packs_rows and num_positions is not None:
        length = min(length, num_positions)
    ids = torch.empty(size, length, dtype=torch.int64, device="meta")
    num_rows = 2 * size if spec.packs_rows else size
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device="meta")
    counts = torch.empty(size, dtype=torch.int64, device="meta")
    most = spec.num_slices * length
    batch = Batch(ids, ids, ids, starts, most, num_tokens=counts, num_slices=spec.num_slices)
    match task.name:
        case TaskName.causal_lm:
            return batch
        case TaskName.preference:
            # The batch has the reference's log-probabilities. A pass that computes them keeps nothing and takes less.
            reference = torch.empty(num_rows // 2 if task.has_pairs else num_rows, 2, device="meta")
            is_good = torch.empty(num_rows, dtype=torch.bool, device="meta")
            return replace(batch, num_answers=num_rows, is_good=is_good, reference=reference)
        case TaskName.reward:
            return replace(batch, num_answers=size, margins=torch.empty(size // 2, device="meta"))
        case TaskName.sequence_classification:
            num_labels = size
        case TaskName.token_classification:
            num_labels = size * length
        case _:
            assert_never(task.name)
    labels = torch.empty(num_labels, label_width(task.settings), device="meta")
    positions = torch.empty(num_labels, dtype=torch.int64, device="meta")
    return replace(batch, labels=labels, label_positions=positions)
