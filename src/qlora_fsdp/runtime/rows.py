"""Which rows of a parameter this rank holds: the one place that knows FSDP2's layout along dim 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.layers import QuantizedLinear

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name, torch >= 2.13


def local_tensor(param: Tensor) -> Tensor:
    """This rank's rows, without autograd; writing to it writes to the parameter."""
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


def shard_group(param: Tensor) -> dist.ProcessGroup | None:
    """The ranks among which the parameter's rows are split, or None if this rank has them all."""
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
    """[first, last) of dim 0 on a rank: as `torch.chunk`, so the last ranks may hold fewer rows, or none."""
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
    """Concatenate every rank's rows into all `num_rows`, whatever their dtype: bytes travel, no value is read.

    Args:
        local: this rank's rows [n, ...], contiguous, on the device of the group.
        num_rows: of all ranks of the group together.
        group: the ranks that hold the rows, as `shard_group` gives them; None: this rank has them all.
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


def gather_pieces(
    held: Sequence[Tensor], num_rows: int, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[int, list[Tensor]]]:
    """All rows of tensors that are split alike, in pieces of 64 MiB at most: a piece's first row, and its rows of each.

    Args:
        held: of each tensor this rank's rows, on any device; the first has the largest.
        num_rows: of all ranks of the group together, of each tensor.
        group: as of `gather_rows`.
        device: where the pieces go.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    chunk = -(num_rows // -num_ranks)
    row_bytes = math.prod(held[0].shape[1:]) * held[0].itemsize
    piece = max(1, 2 * PIECE_BYTES // max(2, num_ranks) // row_bytes)
    for start in range(0, chunk, piece):
        size = min(piece, chunk - start)
        mine = [part[start : start + size].to(device, non_blocking=True) for part in held]
        gathered = mine if num_ranks == 1 else [gather_rows(part, num_ranks * size, group) for part in mine]
        if size == chunk:  # all of every rank: one after another, as in the whole tensor
            yield 0, [part[:num_rows] for part in gathered]
            return
        for rank in range(num_ranks):
            first = rank * chunk + start
            rows = slice(rank * size, rank * size + max(0, min(size, num_rows - first)))
            if rows.stop > rows.start:
                yield first, [part[rows] for part in gathered]


def whole_weight(layer: nn.Module, device: torch.device) -> Tensor:
    """The weight of a linear layer on `device`: as `whole`, or of a `QuantizedLinear` in int8 dequantized.

    Codes are gathered a piece at a time, so that there is one buffer of the weight's size and no other.
    """
    if not isinstance(layer, QuantizedLinear):
        return whole(cast(nn.Linear, layer).weight, device)
    num_rows, columns, format = layer.out_features, layer.in_features, layer.format
    held = [local_tensor(part) for part in (layer.codes, layer.scales)]
    out = torch.empty(num_rows, columns, dtype=layer.compute_dtype, device=device)
    for first, (codes, scales) in gather_pieces(held, num_rows, shard_group(layer.codes), device):
        parts, size = {"codes": codes, "scales": scales}, len(scales)
        out[first : first + size] = format.dequantize(parts, size, columns, layer.compute_dtype)
    return out


def whole(param: Tensor, device: torch.device) -> Tensor:
    """All rows of a parameter on `device`, without autograd: in one new buffer, or its own memory if this rank has all.

    FSDP gathers into a flat buffer and copies it out, so a unit that is large counts twice there.
    """
    local, group = local_tensor(param).to(device, non_blocking=True), shard_group(param)
    return local if group is None or dist.get_world_size(group) == 1 else gather_rows(local, param.shape[0], group)
