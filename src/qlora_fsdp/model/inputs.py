"""What a batch tells the model beside its tokens: positions, and where packed rows begin.

Each kind of layer has a marker of its own for rows. Masks are made from positions that begin anew with each row.
Attention kernels without a mask take the rows' starts (`cu_seq_lens`), and so does a gated delta rule. Convolutions and
state spaces take each token's row (`seq_idx`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import masking_utils

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.data.batch import Batch


def _has_several_rows(batch: Batch) -> bool:
    """Whether a sequence of the batch has more than one row."""
    return len(batch.sequence_starts) > len(batch.input_ids) + 1


@contextmanager
def masks_without_asking(batch: Batch) -> Iterator[None]:
    """While it lasts, transformers makes a batch's masks without asking the device whether rows are packed.

    It reads that off the positions, and waits for the device to find out whether a mask can be left out. The host
    knows from the batch. A wait between kernels takes time, and a step that has one can't be recorded as a CUDA graph.

    Args:
        batch: as `lay_out_for` returned it.
    """
    if batch.num_slices > 1:  # a slice begins within a row
        yield
        return
    rows_of = _rows_in_masks if _has_several_rows(batch) else _one_row
    with replaced([(masking_utils, "find_packed_sequence_indices", rows_of)]):
        yield


def _one_row(position_ids: Tensor) -> None:
    """What masks are made from where each sequence is one row."""
    return None


def _rows_in_masks(position_ids: Tensor) -> Tensor:
    """The row of each token [B, L], as masks compare it: it changes where positions do not go on by one."""
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    rows = position_ids.new_zeros(position_ids.shape)
    rows[:, 1:] = (~goes_on).cumsum(-1)
    return rows


def lay_out_for(batch: Batch, wants_one_sequence: bool) -> Batch:
    """The batch as the model takes it: packages' kernels of recurrent layers want packed rows in one, [1, B * L]."""
    if not wants_one_sequence or not _has_several_rows(batch) or len(batch.input_ids) == 1:
        return batch
    flat = {name: getattr(batch, name).view(1, -1) for name in ("input_ids", "targets", "position_ids")}
    return replace(batch, **flat)


def row_markers(batch: Batch, is_recurrent: bool) -> dict[str, Any]:
    """The arguments of the model's forward, but for the tokens.

    Args:
        batch: as `lay_out_for` returned it.
        is_recurrent: whether the model has recurrent layers.
    """
    inputs: dict[str, Any] = {"position_ids": batch.position_ids, "use_cache": False}
    if _has_several_rows(batch) or batch.num_slices > 1:
        inputs |= {
            "cu_seq_lens_q": batch.sequence_starts,
            "cu_seq_lens_k": batch.sequence_starts,
            "max_length_q": batch.max_row_length,
            "max_length_k": batch.max_row_length,
        }
        if is_recurrent:
            inputs["seq_idx"] = _rows_of_tokens(batch.position_ids)
    return inputs


def _rows_of_tokens(position_ids: Tensor) -> Tensor:
    """The row that each token belongs to, counted from 0: int32 [B, L]."""
    return (position_ids == 0).cumsum(-1).int() - 1
