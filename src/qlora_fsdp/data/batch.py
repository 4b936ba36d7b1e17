"""Stage 7, batch: which sequences each rank computes, and their tensors.

The whole data is put in order first, and divided among ranks and micro-batches afterwards. So the same data gives the
same global batches at any number of ranks and any micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.data.sequences import Indices, TrainingData

LENGTH_MULTIPLE = 8  # matrix products run faster on lengths that are multiples of it


@dataclass(frozen=True)
class Batch:
    """A micro-batch of B sequences of L tokens.

    Attributes:
        input_ids: int64 [B, L].
        targets: int64 [B, L], the token that follows in the same row, or -100 where there is no loss.
        position_ids: int64 [B, L], from 0 in each row.
        sequence_starts: int32 [num_rows + 1], where rows begin in the flattened B x L tokens, and B x L at the end.
            Padding at the end of a sequence counts as a row.
        max_row_length: number of tokens of the longest row.
        labels: float32 [num_labels, numbers per label]; None where tokens are predicted.
        label_positions: int64 [num_labels], what the labels belong to: their index among the B sequences, or among the
            B x L tokens if tokens have labels.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    sequence_starts: torch.Tensor
    max_row_length: int
    labels: torch.Tensor | None = None
    label_positions: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Copies the tensors to `device`. The host does not wait for the copy if they are pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copies the tensors to page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


def micro_batch_indices(global_indices: Indices, *, rank: int, num_ranks: int, micro_batch_size: int) -> list[Indices]:
    """This rank's micro-batches of a global batch.

    Micro-batch m of rank r is `global_indices[(m * num_ranks + r) * micro_batch_size :][:micro_batch_size]`. All ranks
    have the same number of micro-batches. If the global batch is short, some of the last ones are short or empty.
    """
    num_micro_batches = -(-len(global_indices) // (num_ranks * micro_batch_size))
    starts = [(micro * num_ranks + rank) * micro_batch_size for micro in range(num_micro_batches)]
    return [global_indices[start : start + micro_batch_size] for start in starts]


def collate(sequences: TrainingData, indices: Indices, *, micro_batch_size: int) -> Batch:
    """Makes the tensors of a micro-batch, on the CPU.

    With packing, L is max_length, so that shapes never change. Otherwise it is the length of the longest row in the
    micro-batch, rounded up to a multiple of 8.

    Args:
        sequences: the data.
        indices: the sequences of the micro-batch. If they are fewer than B, the rest is padding without targets.
        micro_batch_size: B.
    """
    assert len(indices) <= micro_batch_size
    length = _padded_length(sequences, indices)
    shape = (micro_batch_size, length)
    input_ids = np.full(shape, sequences.pad_token_id, dtype=np.int64)
    targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    positions = np.arange(length)
    row_starts = [0]
    label_positions: list[int] = []
    for b in range(micro_batch_size):
        begin = 0
        for tokens, is_target in sequences.rows_of(int(indices[b])) if b < len(indices) else ():
            end = begin + len(tokens)
            input_ids[b, begin:end] = tokens
            position_ids[b, begin:end] = positions[: end - begin]
            row_starts.append(b * length + end)
            if sequences.has_labels:
                label_positions += (b * length + np.flatnonzero(is_target)).tolist() if is_target.any() else [b]
            else:
                targets[b, begin : end - 1] = np.where(is_target[1:], tokens[1:], IGNORE_INDEX)
            begin = end
        if begin < length:
            position_ids[b, begin:] = positions[: length - begin]
            row_starts.append((b + 1) * length)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        sequence_starts=torch.tensor(row_starts, dtype=torch.int32),
        max_row_length=int(np.diff(row_starts).max()),
        labels=torch.from_numpy(sequences.labels_of(indices)) if sequences.has_labels else None,
        label_positions=torch.tensor(label_positions, dtype=torch.int64) if sequences.has_labels else None,
    )


def _padded_length(sequences: TrainingData, indices: NDArray[np.int64]) -> int:
    if sequences.is_packed:
        return sequences.max_length
    longest = int(sequences.lengths_of(indices).max(initial=1))
    return min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, sequences.max_length)
