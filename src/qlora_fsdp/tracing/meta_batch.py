"""The micro-batch that a trace runs: tensors on meta of the largest shapes that a run's settings allow."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import assert_never

from qlora_fsdp.config.schema import Config, TaskName
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.label_counts import label_width


def batch_on_meta(config: Config, size: int, num_positions: int | None = None) -> Batch:
    """A rank's largest micro-batch, on meta. Each sequence has two rows, or one where rows are padded.

    Args:
        config: the run's settings.
        size: sequences, or pairs of them where each answer of a pair is a sequence of its own.
        num_positions: those that the model has embeddings for, if it has such a table. No row is longer.
    """
    if config.has_pairs and config.is_padded:
        size, length = 2 * size, config.training.max_length
    else:
        length = config.slice_length
    if config.is_padded and num_positions is not None:
        length = min(length, num_positions)
    num_slices = config.distributed.num_slices
    ids = torch.empty(size, length, dtype=torch.int64, device="meta")
    num_rows = size if config.is_padded else 2 * size
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device="meta")
    counts = torch.empty(size, dtype=torch.int64, device="meta")
    batch = Batch(ids, ids, ids, starts, num_slices * length, num_tokens=counts, num_slices=num_slices)
    match config.task.name:
        case TaskName.causal_lm:
            return batch
        case TaskName.preference:
            # The batch has the reference's log-probabilities. A pass that computes them keeps nothing and takes less.
            reference = torch.empty(num_rows // 2 if config.has_pairs else num_rows, 2, device="meta")
            is_good = torch.empty(num_rows, dtype=torch.bool, device="meta")
            return replace(batch, num_answers=num_rows, is_good=is_good, reference=reference)
        case TaskName.reward:
            return replace(batch, num_answers=size, margins=torch.empty(size // 2, device="meta"))
        case TaskName.sequence_classification:
            num_labels = size
        case TaskName.token_classification:
            num_labels = size * length
        case _:
            assert_never(config.task.name)
    labels = torch.empty(num_labels, label_width(config.task), device="meta")
    positions = torch.empty(num_labels, dtype=torch.int64, device="meta")
    return replace(batch, labels=labels, label_positions=positions)
