"""Let the GPUs of a host read frozen weights from one another's memory, where FSDP or the model would gather them.

Each rank puts its rows of these weights into memory that the other ranks can read (runtime/peers.py). How they are read
depends on what they are:

- codes of transformer layers, whole, a layer ahead (peer_codes.py);
- embeddings, the rows that a batch looks up; and the head, whole, if layers stay gathered (peer_ends.py).

Only weights whose rows split into equal parts are read so. The others are gathered, as everything is where GPUs can't
read one another's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.common.sizes import round_up
from qlora_fsdp.common.text import first_line, show_bytes
from qlora_fsdp.config.schema import FsdpConfig
from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.model.peer_codes import PeerCodes
from qlora_fsdp.model.peer_ends import PeerEnds, ends_to_read
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.peers import can_read_peers, share_memory
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import shard_group

ALIGNMENT = 512  # bytes, as torch's allocator aligns
log = logging.getLogger("qlora_fsdp")


@dataclass(frozen=True)
class Shared:
    """The weights that ranks read from one another.

    Attributes:
        codes: those of transformer layers.
        ends: embeddings and head.
        shards: this rank's rows without values, for `place_model`: by the id of the parameter on meta that they
            replace.
    """

    codes: PeerCodes
    ends: PeerEnds
    shards: dict[int, Tensor]

    def connect(self) -> None:
        """Read them from now on. To be called when all ranks have loaded theirs."""
        self.codes.connect()
        self.ends.connect()


def share_frozen(
    model: TaskModel, config: FsdpConfig, processes: Processes, reshard_after_forward: bool
) -> Shared | None:
    """Have frozen weights of a sharded model lie in memory that the other ranks can read. Collective.

    Args:
        model: with FSDP units on meta.
        config: strategy, prefetch and offload.
        processes: all ranks take part.
        reshard_after_forward: whether layers are freed after their forward.

    Returns:
        None if all is gathered: on CPUs, with shards in host memory or on several hosts, and where GPUs can't read one
        another's memory.
    """
    if not config.may_read_peers(processes.num_ranks, processes.local_num_ranks) or not can_read_peers(processes):
        return None
    layers = [_with_codes(layer) for layer in model.layers]
    ends = ends_to_read(model, stay_gathered=not reshard_after_forward)
    params = [module.codes for modules in layers for module in modules]
    params += [param for module in ends for param in module.parameters(recurse=False) if _is_even(param)]
    group = next((shard_group(param) for param in params), None)
    if group is None:
        return None
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    num_bytes = sum(_room(param, num_ranks) for param in params)
    memory: list[Tensor] = []
    reason = None
    try:
        memory = share_memory(num_bytes, group, processes.device)
    except RuntimeError as error:
        if is_shortage(error):
            raise
        reason = first_line(error)
    reason = processes.first_error(reason)
    if reason is not None:
        log.info(f"Sharding: codes are gathered by NCCL, as GPUs can't read one another's memory: {reason}")
        return None
    log.info(f"Sharding: GPUs read {show_bytes(num_bytes)} of frozen weights from each other's memory")
    parts = _split(memory, params, num_ranks)
    num_sets = config.num_gathered if reshard_after_forward else len(layers)
    return Shared(
        PeerCodes(layers, parts, rank, num_sets, processes.device),
        PeerEnds(model, parts),
        {id(param): _shard(param, parts[id(param)][rank]) for param in params},
    )


def _with_codes(layer: nn.Module) -> list[QuantizedLayer]:
    """What in a layer has codes that are read from other ranks, those of most bytes first."""
    found = [module for module in layer.modules() if isinstance(module, QuantizedLayer) and _is_even(module.codes)]
    return sorted(found, key=lambda module: module.codes.nbytes, reverse=True)


def _is_even(param: Tensor) -> bool:
    """Whether a parameter's rows split into equal parts."""
    return isinstance(param, DTensor) and param.shape[0] % dist.get_world_size(shard_group(param)) == 0


def _room(param: Tensor, num_ranks: int) -> int:
    """Bytes that a rank's part of the parameter takes in the memory that others read."""
    return round_up(param.nbytes // num_ranks, ALIGNMENT)


def _split(memory: Iterable[Tensor], params: Iterable[Tensor], num_ranks: int) -> dict[int, list[Tensor]]:
    """Where each rank has its rows of each parameter: uint8, by the parameter's id."""
    parts, first, memory = {}, 0, list(memory)
    for param in params:
        last = first + param.nbytes // num_ranks
        parts[id(param)] = [of_rank[first:last] for of_rank in memory]
        first += _room(param, num_ranks)
    return parts


def _shard(param: Tensor, own: Tensor) -> Tensor:
    """A sharded parameter whose rows on this rank lie in the given bytes."""
    assert isinstance(param, DTensor)
    local = own.view(param.dtype).view(param.to_local().shape)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
