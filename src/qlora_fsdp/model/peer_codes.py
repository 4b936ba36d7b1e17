"""Gather the codes of transformer layers by reading them from the memory of the other GPUs.

Codes are some 90 % of a layer's bytes, and they never change in a run. So a rank can copy those of another rank at any
time, without asking it. FSDP would gather them with NCCL instead, whose kernels take multiprocessors from the products
that run beside them, and would copy each layer into a flat buffer and out of it again. Copy engines take nothing from
the products, and write codes to where they are used (runtime/peers.py; docs/decisions.md has the measurements).

FSDP still says when: it gathers a layer ahead, and frees it. But for a tensor that has `fsdp_pre_all_gather` it calls
that where it would begin a gather, and `fsdp_post_all_gather` where it would wait for its end. These two are torch's
extension points for tensors that are gathered in a way of their own. What is trained, and whatever else is no codes,
goes through NCCL as before.

Whole codes lie in buffers that stay where they are:

- If layers are freed after their forward, there are as many sets of buffers as layers can be gathered at a time. Layer
  i uses set i modulo their number. Each gather fills a set anew.
- If layers stay gathered, each has a set of its own, which is filled once for the whole run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.common.sizes import round_up
from qlora_fsdp.common.text import first_line, show_bytes
from qlora_fsdp.config.schema import FsdpConfig
from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.runtime.hardware import is_shortage
from qlora_fsdp.runtime.peers import can_read_peers, share_memory, start_copies, wait_for
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import shard_group

ALIGNMENT = 512  # bytes, as torch's allocator aligns
TOKEN_BYTES = 16  # FSDP asks for something to gather of each tensor
log = logging.getLogger("qlora_fsdp")


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
        own: this rank's rows, uint8, in memory that other ranks can read.
        buffer: where all rows are put together.
        copies: destination and source of each rank's rows.
    """

    layer: QuantizedLayer
    shape: torch.Size
    own: Tensor
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
        found: of each transformer layer, in the order in which they run, what `read_codes` finds there, on meta.
        memory: of each rank of the shard group, uint8, with room for its part of all of these (`_room`).
        rank: this rank's place in the group.
        num_sets: sets of buffers; as many as there are layers if layers stay gathered.
        device: where the layers compute.
    """

    def __init__(
        self,
        found: Sequence[Sequence[QuantizedLayer]],
        memory: Sequence[Tensor],
        rank: int,
        num_sets: int,
        device: torch.device,
    ) -> None:
        self.device, self.stays = device, num_sets >= len(found)
        self.token = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device=device)
        sizes = [[_num_bytes(module) for module in modules] for modules in found]
        num_sets, sets = min(num_sets, len(found)), []
        for index in range(num_sets):  # each has room for any of its layers
            largest = map(max, zip_longest(*sizes[index::num_sets], fillvalue=0))
            sets.append([Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for size in largest])
        self.codes, first = [], 0
        for index, modules in enumerate(found):
            for module, buffer in zip(modules, sets[index % num_sets], strict=False):
                num_bytes = _num_bytes(module) // len(memory)
                parts = [of_rank[first : first + num_bytes] for of_rank in memory]
                # What was saved for backward need not be told that its memory is written to: it gets the same values.
                rows = buffer.bytes.data.split(num_bytes)
                # Each rank begins with its own rows and then reads another peer than the others do.
                order = (*range(rank, len(memory)), *range(rank))
                copies = [(rows[peer], parts[peer]) for peer in order]
                self.codes.append(Codes(module, module.codes.shape, parts[rank], buffer, copies))
                first += _room(module, len(memory))

    def shards(self) -> dict[int, Tensor]:
        """This rank's rows without values, for `place_model`: by the id of the parameter on meta that they replace."""
        placed: dict[int, Tensor] = {}
        for codes in self.codes:
            param = codes.layer.codes
            assert isinstance(param, DTensor)
            local = codes.own.view(param.dtype).view(param.to_local().shape)
            placed[id(param)] = DTensor.from_local(
                local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        return placed

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


def share_codes(
    layers: Sequence[nn.Module], config: FsdpConfig, processes: Processes, reshard_after_forward: bool
) -> PeerCodes | None:
    """Have the codes of sharded layers lie in memory that the other ranks can read. Collective.

    Args:
        layers: the transformer layers, FSDP units on meta.
        config: strategy, prefetch and offload.
        processes: all ranks take part.
        reshard_after_forward: whether layers are freed after their forward.

    Returns:
        None if FSDP gathers all parameters by itself: on CPUs, with shards in host memory or on several hosts, and
        where GPUs can't read one another's memory.
    """
    if not config.may_read_peers(processes.num_ranks, processes.local_num_ranks) or not can_read_peers(processes):
        return None
    found = [read_codes(layer) for layer in layers]
    group = next((shard_group(module.codes) for modules in found for module in modules), None)
    if group is None:
        return None
    num_bytes = sum(_room(module, dist.get_world_size(group)) for modules in found for module in modules)
    memory, reason = [], None
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
    log.info(f"Sharding: GPUs read {show_bytes(num_bytes)} of codes from each other's memory")
    num_sets = config.num_gathered if reshard_after_forward else len(layers)
    return PeerCodes(found, memory, dist.get_rank(group), num_sets, processes.device)


def read_codes(layer: nn.Module) -> list[QuantizedLayer]:
    """What has codes that are read from other ranks, those of most bytes first: codes that split into equal parts."""
    found = [module for module in layer.modules() if isinstance(module, QuantizedLayer) and _is_even(module.codes)]
    return sorted(found, key=_num_bytes, reverse=True)


def _is_even(param: Tensor) -> bool:
    return isinstance(param, DTensor) and param.shape[0] % dist.get_world_size(shard_group(param)) == 0


def _num_bytes(module: QuantizedLayer) -> int:
    return module.codes.numel() * module.codes.element_size()


def _room(module: QuantizedLayer, num_shards: int) -> int:
    """Bytes that a rank's part of the codes takes in the memory that others read."""
    return round_up(_num_bytes(module) // num_shards, ALIGNMENT)
