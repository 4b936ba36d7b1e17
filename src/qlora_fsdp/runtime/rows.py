"""Which rows of a parameter this rank holds.

At run time this is the only module that uses how FSDP2 splits dim 0. `memory/model_bytes.py` predicts the same
split without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from qlora_fsdp.common.sizes import PIECE_BYTES

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name, torch >= 2.13


def local_tensor(param: Tensor) -> Tensor:
    """This rank's rows, without autograd. Writing to them writes to the parameter."""
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


def shard_group(param: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the parameter's rows; None if this rank has them all."""
    if isinstance(param, DTensor):
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                return param.device_mesh.get_group(axis)
    return None


def replica_of(param: Tensor) -> tuple[int, int]:
    """Which of the ranks that hold the same rows of the parameter this one is, and how many there are."""
    if not isinstance(param, DTensor):
        return dist.get_rank(), dist.get_world_size()
    index, count = 0, 1
    for axis, placement in enumerate(param.placements):
        if not isinstance(placement, Shard):
            size = param.device_mesh.size(axis)
            index, count = index * size + param.device_mesh.get_local_rank(axis), count * size
    return index, count


def rows_of_rank(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """[first, last) of dim 0 on a rank, split like `torch.chunk`: the last ranks may hold fewer rows, or none."""
    chunk = -(num_rows // -num_ranks)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def local_rows(param: Tensor) -> tuple[int, int]:
    """[first, last) of the parameter's rows that this rank holds."""
    group = shard_group(param)
    if group is None:
        return 0, param.shape[0]
    first, last = rows_of_rank(param.shape[0], dist.get_rank(group), dist.get_world_size(group))
    assert local_tensor(param).shape[0] == last - first, "FSDP2 splits rows in another way than torch.chunk"
    return first, last


def gather_rows(local: Tensor, num_rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate the rows of all ranks. They travel as bytes, so no value of any dtype can change.

    Args:
        local: this rank's rows [n, ...], contiguous, on the device of the group.
        num_rows: rows of all ranks of the group together.
        group: the ranks that hold the rows, from `shard_group`; None if this rank has them all.
    """
    if group is None:
        return local
    num_ranks = dist.get_world_size(group)
    chunk = -(num_rows // -num_ranks)
    padded = local.contiguous()
    if local.shape[0] < chunk:
        padded = local.new_zeros(chunk, *local.shape[1:])
        padded[: local.shape[0]].view(torch.uint8).copy_(local.contiguous().view(torch.uint8))
    gathered = local.new_empty(chunk * num_ranks, *local.shape[1:])
    _all_gather(gathered.flatten().view(torch.uint8), padded.flatten().view(torch.uint8), group=group)
    return gathered[:num_rows]


def find_largest(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of the ranks' values, element by element.

    Args:
        local: this rank's values, on the device of the group; they may be overwritten.
        group: the ranks that hold the rows, from `shard_group`; None if this rank has them all.
    """
    if group is not None:
        dist.all_reduce(local, dist.ReduceOp.MAX, group)
    return local


def gather_columns(parts: Sequence[Tensor], widths: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Concatenate the columns of all ranks, those of several matrices in one call.

    Args:
        parts: this rank's columns of each matrix [N, n], as the rows of a matrix with that many are split.
        widths: columns of each whole matrix.
        group: the ranks that hold the columns; None if this rank has them all.
    """
    if group is None:
        return list(parts)
    num_ranks, num_rows = dist.get_world_size(group), len(parts[0])
    chunks = [-(width // -num_ranks) for width in widths]
    padded = [F.pad(part, (0, chunk - part.shape[1])) for part, chunk in zip(parts, chunks, strict=True)]
    own = torch.cat(padded, 1) if len(padded) > 1 else padded[0].contiguous()
    gathered = own.new_empty(num_ranks, num_rows, own.shape[1])
    _all_gather(gathered.flatten().view(torch.uint8), own.flatten().view(torch.uint8), group=group)
    whole = [columns.transpose(0, 1).reshape(num_rows, -1) for columns in gathered.split(chunks, 2)]
    return [columns[:, :width] for columns, width in zip(whole, widths, strict=True)]


def gather_pieces(
    held: Sequence[Tensor], num_rows: int, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[int, list[Tensor]]]:
    """Gather tensors that are split alike, in pieces of at most 64 MiB.

    Args:
        held: this rank's rows of each tensor, on any device. The first tensor has the largest rows.
        num_rows: rows of each whole tensor.
        group: the ranks that hold the rows, from `shard_group`; None if this rank has them all.
        device: where the pieces go.

    Yields:
        The first row of a piece, and the piece of each tensor.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    chunk = -(num_rows // -num_ranks)
    row_bytes = math.prod(held[0].shape[1:]) * held[0].itemsize
    piece = max(1, 2 * PIECE_BYTES // max(2, num_ranks) // row_bytes)
    for start in range(0, chunk, piece):
        size = min(piece, chunk - start)
        mine = [part[start : start + size].to(device, non_blocking=True) for part in held]
        gathered = mine if num_ranks == 1 else [gather_rows(part, num_ranks * size, group) for part in mine]
        if size == chunk:  # one piece has all rows of every rank, in the order of the whole tensor
            yield 0, [part[:num_rows] for part in gathered]
            return
        for rank in range(num_ranks):
            first = rank * chunk + start
            rows = slice(rank * size, rank * size + max(0, min(size, num_rows - first)))
            if rows.stop > rows.start:
                yield first, [part[rows] for part in gathered]


def gather_whole(param: Tensor, device: torch.device) -> Tensor:
    """All rows of a parameter on `device`, without autograd.

    They are in one new buffer, or in the parameter's own memory if this rank has all rows. FSDP itself gathers a unit
    into a flat buffer and copies it out, so a large parameter would take its memory twice.
    """
    local, group = local_tensor(param).to(device, non_blocking=True), shard_group(param)
    return local if group is None or dist.get_world_size(group) == 1 else gather_rows(local, param.shape[0], group)
