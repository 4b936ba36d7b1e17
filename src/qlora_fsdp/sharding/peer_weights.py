"""Let the GPUs of a host read frozen weights from one another's memory, where FSDP or the model would gather them.

Each rank puts its rows of these weights into memory that the other ranks can read (runtime/peers.py). How they are read
depends on what they are:

- codes of transformer layers, whole, a layer ahead (peer_codes.py);
- embeddings, the rows that a batch looks up; and the head, whole, if layers stay gathered (peer_ends.py).

If layers stay gathered, each rank puts whole weights together where its own rows lie, so that no row is there twice.

Only weights whose rows split into equal parts are read so. The others are gathered, as everything is where GPUs can't
read one another's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from qlora_fsdp.common.sizes import NUM_AHEAD, round_up
from qlora_fsdp.common.text import first_line, show_bytes
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.peers import PeerPlace, can_read_peers, share_memory
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import shard_group
from qlora_fsdp.sharding.peer_codes import PeerCodes
from qlora_fsdp.sharding.peer_ends import PeerEnds, ends_to_read

ALIGNMENT = 512  # bytes, as torch's allocator aligns
log = logging.getLogger("qlora_fsdp")


@dataclass(frozen=True)
class PeerWeights:
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


def make_peer_weights(model: TaskModel, spec: ShardSpec, processes: Processes) -> PeerWeights | None:
    """Have frozen weights of a sharded model lie in memory that the other ranks can read. Collective.

    Args:
        model: with FSDP units on meta.
        spec: how it is split.
        processes: all ranks take part.

    Returns:
        None if all is gathered: on CPUs, with shards in host memory or on several hosts, and where GPUs can't read one
        another's memory.
    """
    if not (spec.reads_peers and spec.may_read_peers) or not can_read_peers(processes):
        return None
    stay_gathered = not spec.reshard_after_forward
    layers = [_with_codes(layer) for layer in model.layers]
    wanted = [(module.codes, stay_gathered) for modules in layers for module in modules]
    for end in ends_to_read(model, stay_gathered):
        wanted += [(param, end is model.head) for param in end.parameters(recurse=False) if _is_even(param)]
    group = next((shard_group(param) for param, _ in wanted), None)
    if group is None:
        return None
    num_ranks = dist.get_world_size(group)
    num_bytes = sum(_room(param, is_whole, num_ranks) for param, is_whole in wanted)
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
    log.info(f"Sharding: GPUs read frozen weights from each other's memory, {show_bytes(num_bytes)} on each")
    places = _find_places(memory, dist.get_rank(group), wanted)
    return PeerWeights(
        PeerCodes(layers, places, None if stay_gathered else 1 + NUM_AHEAD, processes.device),
        PeerEnds(model, places, processes.device),
        {id(param): _shard(param, places[id(param)]) for param, _ in wanted},
    )


def _with_codes(layer: nn.Module) -> list[QuantizedLayer]:
    """What in a layer has codes that are read from other ranks, those of most bytes first."""
    found = [module for module in layer.modules() if isinstance(module, QuantizedLayer) and _is_even(module.codes)]
    return sorted(found, key=lambda module: module.codes.nbytes, reverse=True)


def _is_even(param: Tensor) -> bool:
    """Whether a parameter's rows split into equal parts."""
    return isinstance(param, DTensor) and param.shape[0] % dist.get_world_size(shard_group(param)) == 0


def _room(param: Tensor, is_whole: bool, num_ranks: int) -> int:
    """Bytes that a parameter takes in the memory of each rank that others read."""
    return round_up(param.nbytes if is_whole else param.nbytes // num_ranks, ALIGNMENT)


def _find_places(memory: Sequence[Tensor], rank: int, wanted: Iterable[tuple[Tensor, bool]]) -> dict[int, PeerPlace]:
    """Where the parameters lie in the memory of the ranks, by their ids.

    Args:
        memory: of each rank, uint8.
        rank: this one.
        wanted: parameters, with whether each rank has room for all rows, and not for its own alone.
    """
    places: dict[int, PeerPlace] = {}
    first = 0
    for param, is_whole in wanted:
        size = param.nbytes // len(memory)
        if is_whole:
            rooms = [of_rank[first : first + param.nbytes] for of_rank in memory]
            parts = [room[peer * size : (peer + 1) * size] for peer, room in enumerate(rooms)]
            # FSDP takes it that a whole tensor begins where its storage does: one that came through DLPack does.
            places[id(param)] = PeerPlace(parts, rank, from_dlpack(rooms[rank]))
        else:
            parts = [of_rank[first : first + size] for of_rank in memory]
            places[id(param)] = PeerPlace(parts, rank, None)
        first += _room(param, is_whole, len(memory))
    return places


def _shard(param: Tensor, place: PeerPlace) -> Tensor:
    """A sharded parameter whose rows on this rank lie in its place."""
    assert isinstance(param, DTensor)
    local = place.parts[place.rank].view(param.dtype).view(param.to_local().shape)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
