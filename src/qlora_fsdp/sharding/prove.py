"""Prove at every start that what FSDP gathers is, byte for byte, what the ranks hold.

A wrong byte in a quantized weight raises no error: training runs on a slightly wrong model, and its loss still falls.
The proof therefore can't be turned off. Each quantized weight is gathered twice, by FSDP as forward will gather it, and
directly as bytes, and the two are compared. The direct gather goes piece by piece, so the proof needs no more memory
than a step. It passes over the weights once. Embeddings and a head that are read from other GPUs' memory are compared
with gathered ones too. If FSDP is not used (see shard.py), there is nothing to prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qlora_fsdp.common.errors import ProofError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import gather_pieces, local_tensor, rows_of_rank, shard_group
from qlora_fsdp.sharding.peer_weights import ReadRows, rows_between
from qlora_fsdp.sharding.shard import modules_of_unit


@dataclass(frozen=True)
class Proof:
    """Counts of what was compared, over the whole model."""

    num_tensors: int
    num_bytes: int


@torch.no_grad()
def prove_shards(
    model: nn.Module,
    units: Sequence[FSDPModule],
    processes: Processes,
    num_ranks_launched: int,
    read: Iterable[tuple[Tensor, ReadRows]] = (),
) -> Proof:
    """Check the sharded, loaded model. Collective.

    Args:
        model: the root module.
        units: the FSDP units, as `shard_model` returned them; without any there is nothing to compare.
        processes: all ranks take part.
        num_ranks_launched: WORLD_SIZE as the launcher set it.
        read: parameters that are read from other ranks, with what reads their rows (`PeerEnds.readers`).

    Raises:
        ProofError: another number of ranks takes part than was launched, a quantized parameter is not sharded or has
            other rows than planned, or a gathered byte differs; the parameters are named.
    """
    problems = []
    if processes.num_ranks != num_ranks_launched or dist.get_world_size() != num_ranks_launched:
        problems.append(f"{num_ranks_launched} ranks were launched, {dist.get_world_size()} take part")
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    num_tensors = num_bytes = 0
    counters: list[tuple[str, Tensor]] = []
    for unit in units:
        assert isinstance(unit, nn.Module)  # FSDPModule alone is a mix-in
        sharded = _own_quantized_parts(unit)
        if not sharded:
            continue
        for part in sharded.values():
            problems.extend(_layout_problems(names[id(part)], part))
        unit.unshard()
        for (layer, part_name), part in sharded.items():
            gathered = getattr(layer, part_name)
            counters.append(
                (names[id(part)], _count_differences(partial(rows_between, gathered), part, processes.device))
            )
            num_tensors += 1
            num_bytes += gathered.nbytes
        unit.reshard()
    for part, read_rows in read:
        counters.append((names[id(part)], _count_differences(read_rows, part, processes.device)))
        num_tensors += 1
        num_bytes += part.nbytes
    counts = torch.stack([count for _, count in counters]).tolist() if counters else []
    problems += [f"{name}: {int(n):,} bytes differ" for (name, _), n in zip(counters, counts, strict=True) if n]
    everyone = [
        line
        for rank, lines in enumerate(processes.gather(problems, list[str]))
        for line in (f"rank {rank}: {p}" for p in lines)
    ]
    if everyone:
        raise ProofError(
            f"The gathered weights are not the ones that were loaded ({len(everyone)} problems). Training on them "
            "would give a wrong model without an error. If GPUs of this host read one another's memory wrongly, "
            "NCCL_P2P_DISABLE=1 in the environment avoids that; else "
            f"report this with environment.json:\n{list_some(everyone)}"
        )
    return Proof(num_tensors, num_bytes)


def _own_quantized_parts(unit: nn.Module) -> Mapping[tuple[QuantizedLayer, str], Tensor]:
    """The codes and scales that this unit gathers itself, by layer and name."""
    layers = [module for module in modules_of_unit(unit) if isinstance(module, QuantizedLayer)]
    return {(layer, name): part for layer in layers for name, part in zip(layer.part_names, layer.parts(), strict=True)}


def _layout_problems(name: str, part: Tensor) -> list[str]:
    if not isinstance(part, DTensor):
        return [f"{name}: not sharded"]
    group = shard_group(part)
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    first, last = rows_of_rank(part.shape[0], rank, size)
    if local_tensor(part).shape[0] != last - first:
        return [f"{name}: {local_tensor(part).shape[0]} rows here, {last - first} planned"]
    return []


def _count_differences(read: ReadRows, part: Tensor, device: torch.device) -> Tensor:
    """Number of bytes in which the rows that are read differ from the ranks' shards: int64 scalar on the device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for first, (rows,) in gather_pieces([local_tensor(part)], part.shape[0], shard_group(part), device):
        found = read(first, first + len(rows)).contiguous().view(torch.uint8)
        total += (found != rows.contiguous().view(torch.uint8)).sum()
    return total
