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
from dataclasses import dataclass, field
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
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def whole(self) -> Tensor:
        """All rows, in the buffer."""
        num_bytes = self.shape.numel() * self.layer.codes.element_size()
        return self.buffer.bytes[:num_bytes].view(self.layer.codes.dtype).view(self.shape)


class PeerCodes:
    """The codes of all transformer layers of a sharded model, which each rank reads from the others.

    Args:
        layers: transformer layers, in the order in which they run; FSDP units with parameters on meta.
        memory: of each rank of the shard group, uint8, at least `shared_bytes`.
        num_sets: sets of buffers; as many as there are layers if layers stay gathered.
        device: where the layers compute.
    """

    def __init__(self, layers: Sequence[nn.Module], memory: Sequence[Tensor], num_sets: int, device: torch.device):
        self.device, self.stays = device, num_sets >= len(layers)
        self.token = torch.empty(TOKEN_BYTES, dtype=torch.uint8, device=device)
        found = [sorted(read_codes(layer), key=_num_bytes, reverse=True) for layer in layers]
        sizes = [[_num_bytes(module) for module in modules] for modules in found]
        num_sets = min(num_sets, len(layers))
        sets = []
        for index in range(num_sets):  # each has room for any of its layers
            largest = map(max, zip_longest(*sizes[index::num_sets], fillvalue=0))
            sets.append([Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for size in largest])
        self.codes, first, rank = [], 0, dist.get_rank(_group(found))
        for index, modules in enumerate(found):
            for module, buffer in zip(modules, sets[index % num_sets], strict=False):
                num_bytes = _num_bytes(module) // len(memory)
                codes = Codes(module, module.codes.shape, memory[rank][first : first + num_bytes], buffer)
                # What was saved for backward need not be told that its memory is written to: it gets the same values.
                rows = buffer.bytes.data.split(num_bytes)
                # Each rank begins with its own rows and then reads another peer than the others do.
                for peer in (*range(rank, len(memory)), *range(rank)):
                    codes.copies.append((rows[peer], memory[peer][first : first + num_bytes]))
                self.codes.append(codes)
                first = round_up(first + num_bytes, ALIGNMENT)

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
    num_bytes = shared_bytes(layers, config.num_shards(processes.num_ranks, processes.local_num_ranks))
    if num_bytes == 0:
        return None
    memory, reason = [], None
    try:
        memory = share_memory(num_bytes, _group([read_codes(layer) for layer in layers]), processes.device)
    except RuntimeError as error:
        if is_shortage(error):
            raise
        reason = first_line(error)
    reason = processes.first_error(reason)
    if reason is not None:
        log.info(f"Sharding: codes are gathered by NCCL, as GPUs can't read one another's memory: {reason}")
        return None
    log.info(f"Sharding: GPUs read {show_bytes(num_bytes)} of codes from each other's memory")
    return PeerCodes(layers, memory, config.num_gathered if reshard_after_forward else len(layers), processes.device)


def shared_bytes(layers: Sequence[nn.Module], num_shards: int) -> int:
    """Bytes of a rank's part of all codes that others read."""
    return sum(round_up(_num_bytes(m) // num_shards, ALIGNMENT) for layer in layers for m in read_codes(layer))


def read_codes(layer: nn.Module) -> list[QuantizedLayer]:
    """The quantized layers whose codes are read from other ranks: those that are split into equal parts."""
    return [module for module in layer.modules() if isinstance(module, QuantizedLayer) and _is_even(module.codes)]


def _is_even(param: Tensor) -> bool:
    return isinstance(param, DTensor) and param.shape[0] % dist.get_world_size(shard_group(param)) == 0


def _num_bytes(module: QuantizedLayer) -> int:
    return module.codes.numel() * module.codes.element_size()


def _group(found: Sequence[Sequence[QuantizedLayer]]) -> dist.ProcessGroup:
    """The ranks among which codes are split."""
    group = next(shard_group(module.codes) for modules in found for module in modules)
    assert group is not None
    return group
