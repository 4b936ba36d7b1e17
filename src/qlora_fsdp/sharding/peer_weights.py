"""Let the GPUs of a host read frozen weights from one another's memory, where FSDP or the model would gather them.

Each rank puts its rows of these weights into memory that the other ranks can read (runtime/peers.py). How they are read
depends on what they are:

- codes of transformer layers, whole, a layer ahead;
- embeddings, the rows that a batch looks up; and the head, whole, if layers stay gathered.

If layers stay gathered, each rank puts whole weights together where its own rows lie, so that no row is there twice.

Only weights whose rows split into equal parts are read so. The others are gathered, as everything is where GPUs can't
read one another's memory.

Gather the codes of transformer layers by reading them from the memory of the other GPUs.

Codes are some 90 % of a layer's bytes, and they never change in a run. So a rank can copy those of another rank at any
time, without asking it. FSDP would gather them with NCCL instead, whose kernels take multiprocessors from the products
that run beside them, and would copy each layer into a flat buffer and out of it again. Copy engines take nothing from
the products, and write codes to where they are used (runtime/peers.py; measured in benchmarks/measurements.md).

FSDP still says when: it gathers a layer ahead, and frees it. But for a tensor that has `fsdp_pre_all_gather` it calls
that where it would begin a gather, and `fsdp_post_all_gather` where it would wait for its end. These two are torch's
extension points for tensors that are gathered in a way of their own. What is trained, and whatever else is no codes,
goes through NCCL as before.

Whole codes lie in buffers that stay where they are:

- If layers are freed after their forward, there are as many sets of buffers as layers can be gathered at a time. Layer
  i uses set i modulo their number. Each gather fills a set anew.
- If layers stay gathered, each has a set of its own, which is filled once for the whole run. The rank's own rows are
  loaded to their place in it, and are nowhere else.

Frozen embeddings and a frozen head, read from the memory of the other GPUs.

A batch looks up few rows of the embeddings: 1,024 tokens need 8 MiB of the 1 GiB that Llama 3 8B has. So each rank
reads these rows where they are, and the table is not gathered. The kernel that looks rows up does so itself, because
CUDA maps the other GPUs' memory into its own.

The loss needs the whole head, in every micro-batch. If layers stay gathered, there is memory to spare: the head is read
once for the run, and stays too; the rank's own rows have been loaded to their place in it. If layers are freed, the
model gathers the head for each use (layers/head_loss.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from qlora_fsdp.common.sizes import NUM_AHEAD, round_up
from qlora_fsdp.common.text import first_line, show_bytes
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.layers.head_loss import HeadLoss
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.peers import PeerPlace, PeerTable, can_read_peers, share_memory, start_copies, wait_for
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import shard_group
from qlora_fsdp.sharding.shard import embedding_and_head_units

ALIGNMENT = 512  # bytes, as torch's allocator aligns
log = logging.getLogger("qlora_fsdp")
TOKEN_BYTES = 16  # FSDP asks for something to gather of each tensor
ReadRows = Callable[[int, int], Tensor]  # rows [first, last) of a parameter


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


@dataclass(eq=False)
class Buffer:
    """Memory for one whole tensor of codes of a layer that is gathered.

    Attributes:
        bytes: uint8.
        holder: the layer whose codes it has now.
    """

    bytes: Tensor
    holder: QuantizedLayer | None = None


@dataclass(eq=False)
class Codes:
    """The codes of a quantized layer.

    Attributes:
        layer: the module that has them.
        shape: of all rows.
        buffer: where all rows are put together.
        copies: destination and source of each rank's rows.
    """

    layer: QuantizedLayer
    shape: torch.Size
    buffer: Buffer
    copies: list[tuple[Tensor, Tensor]]

    @property
    def whole(self) -> Tensor:
        """All rows, in the buffer."""
        num_bytes = self.shape.numel() * self.layer.codes.element_size()
        return self.buffer.bytes[:num_bytes].view(self.layer.codes.dtype).view(self.shape)


class PeerCodes:
    """The codes of all transformer layers of a sharded model, which each rank reads from the others.

    Args:
        found: of each transformer layer, in the order in which they run, what has codes to be read, on meta; those of
            most bytes first.
        places: where their codes lie, by the id of the codes on meta.
        num_sets: sets of buffers. None: layers stay gathered, and the places have room for whole codes.
        device: where the layers compute.
    """

    def __init__(
        self,
        found: Sequence[Sequence[QuantizedLayer]],
        places: Mapping[int, PeerPlace],
        num_sets: int | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self.stays = num_sets is None
        self.token = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device=device)
        sets = [] if num_sets is None else _make_sets(found, num_sets, device)
        self.codes = []
        for index, modules in enumerate(found):
            for number, module in enumerate(modules):
                place = places[id(module.codes)]
                buffer = Buffer(place.whole) if place.whole is not None else sets[index % len(sets)][number]
                # What was saved for backward need not be told that its memory is written to: it gets the same values.
                copies = place.copies_to(buffer.bytes.data)
                self.codes.append(Codes(module, module.codes.shape, buffer, copies))

    def connect(self) -> None:
        """Have FSDP read codes from now on. To be called when all ranks have loaded theirs."""
        for codes in self.codes:
            param = codes.layer.codes
            assert isinstance(param, DTensor)
            local: Any = param._local_tensor  # what FSDP itself holds; `to_local` returns a view of it
            local.fsdp_pre_all_gather = partial(self._begin, codes)
            local.fsdp_post_all_gather = partial(self._end, codes)
            if self.stays:
                wait_for(self._read(codes), self.device)

    def _begin(self, codes: Codes, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        """What FSDP calls where it would begin to gather. Returns what it gathers instead, and what `_end` gets."""
        return (self.token,), None if self.stays else self._read(codes)

    def _end(self, codes: Codes, outputs: Any, copied: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """What FSDP calls where it would wait. The first time it asks where the whole is, and what of it to free."""
        wait_for(copied, self.device)
        return (codes.whole, ()) if out is None else None

    def _read(self, codes: Codes) -> torch.cuda.Event | None:
        """Start to put all rows of the codes together in their buffer.

        Raises:
            RuntimeError: another layer that is still gathered has its codes there.
        """
        holder = codes.buffer.holder
        if holder is not None and holder is not codes.layer and not isinstance(holder.codes, DTensor):
            raise RuntimeError("Two layers are gathered at a time whose codes have the same place.")
        codes.buffer.holder = codes.layer
        return start_copies(codes.copies, self.device)


def _make_sets(found: Sequence[Sequence[QuantizedLayer]], number: int, device: torch.device) -> list[list[Buffer]]:
    """Sets of buffers, each with room for any of the layers that use it."""
    sets = []
    for index in range(min(number, len(found))):
        sizes = [[module.codes.nbytes for module in modules] for modules in found[index::number]]
        largest = map(max, zip_longest(*sizes, fillvalue=0))
        sets.append([Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for size in largest])
    return sets


def ends_to_read(model: TaskModel, stay_gathered: bool) -> list[nn.Module]:
    """Those of embeddings and head that are read, of what the model gathers itself.

    A head in int8 is not: it would be held as int8 and used in bf16, and whoever wants int8 wants to save memory.

    Args:
        model: with FSDP units, on meta.
        stay_gathered: whether layers stay gathered between forward and backward.
    """
    found = [module for module in embedding_and_head_units(model) if module in model.gathered_by_model]
    stays = stay_gathered and not isinstance(model.head, QuantizedLayer)
    return [module for module in found if module is model.embeddings or stays]


class PeerEnds:
    """Embeddings and head of a sharded model, as far as each rank reads them from the others.

    Args:
        model: its embeddings and head are on meta.
        places: where their parameters lie, by the id of the parameter on meta; with room for a whole head.
        device: where they are used.

    Attributes:
        embeddings: the embeddings' parameters by name; none if they are gathered.
        head: the whole weight of the head, which is complete from `connect` on; None if it is gathered.
    """

    def __init__(self, model: TaskModel, places: Mapping[int, PeerPlace], device: torch.device) -> None:
        self.model = model
        self.device = device
        self.head: Tensor | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.embeddings: dict[str, PeerTable] = {}
        for name, param in model.embeddings.named_parameters(recurse=False):
            if id(param) in places:
                rows = [part.view(param.dtype).view(-1, *param.shape[1:]) for part in places[id(param)].parts]
                self.embeddings[name] = PeerTable(rows)
        weight = None if model.head is None else dict(model.head.named_parameters(recurse=False)).get("weight")
        place = places.get(id(weight))
        if weight is not None and place is not None and place.whole is not None:
            self.head = place.whole.view(weight.dtype).view(weight.shape)
            self._copies = place.copies_to(place.whole)

    def connect(self) -> None:
        """Have the model read them from now on. To be called when all ranks have loaded theirs."""
        self.model.embedding_tables = list(self.embeddings.values())
        if self.head is not None:
            wait_for(start_copies(self._copies, self.device), self.device)
            cast(HeadLoss, self.model.base.get_output_embeddings().forward).whole_weight = self.head

    def readers(self) -> Iterator[tuple[Tensor, ReadRows]]:
        """For the proof: each parameter that is read, and what reads its rows [first, last) as the model does."""
        for name, table in self.embeddings.items():
            yield self.model.embeddings.get_parameter(name), table.slice
        if self.head is not None:
            yield cast(nn.Module, self.model.head).get_parameter("weight"), partial(rows_between, self.head)


def rows_between(rows: Tensor, first: int, last: int) -> Tensor:
    """Rows first to last - 1 of a tensor."""
    return rows[first:last]
