"""Memory of other GPUs of the host, which this process can read.

Each rank puts what others may read into memory of a kind that CUDA maps into other processes. torch calls it symmetric
memory (torch.distributed._symmetric_memory, the CUDA backend). The rank that owns the memory takes no part in a read.
A copy of much is done by a copy engine, without a kernel on either GPU; a kernel can also read it like its own memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from qlora_fsdp.runtime.processes import Processes


def can_read_peers(processes: Processes) -> bool:
    """Whether every rank can read the memory of all GPUs of its host. Collective.

    GeForce cards from the 40 series on can't, nor can processes of which each sees its own GPU alone. NCCL's variable
    NCCL_P2P_DISABLE, which is set on hosts where such reads give wrong bytes, counts here too.
    """
    device, count = processes.device, processes.local_num_ranks
    others = [index for index in range(count) if index != device.index]
    can = device.type == "cuda" and torch.cuda.device_count() >= count
    can = can and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    can = can and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    return all(processes.gather(can, bool))


def share_memory(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Allocate memory that all ranks of the group can read. Collective.

    Args:
        num_bytes: the same on all ranks.
        group: ranks of one host.
        device: this rank's GPU.

    Returns:
        The memory of each rank of the group, uint8 [num_bytes], this rank's own among them. torch's allocator counts
        its own, as any tensor.
    """
    # What is only read needs none of the multicast objects that torch makes by default, of which NVSwitches have few.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
        own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(own, group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return [own if peer == rank else handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(size)]


@dataclass(frozen=True)
class PeerPlace:
    """Where the ranks have a tensor of which each holds as many rows as the others.

    Attributes:
        parts: the rows of each rank, uint8, in memory that all can read.
        rank: this rank.
        whole: this rank's memory for all rows, uint8, in which its own part lies. None if it has that part alone.
    """

    parts: Sequence[Tensor]
    rank: int
    whole: Tensor | None = None

    def copies_to(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The copies that put all rows together in `whole`, for `start_copies`.

        A rank begins with its own rows, unless they are there, and then reads another peer than the others do.
        """
        rows, num_ranks = whole.split(self.parts[0].nbytes), len(self.parts)
        first = self.rank if self.whole is None else self.rank + 1
        peers = [number % num_ranks for number in range(first, self.rank + num_ranks)]
        return [(rows[peer], self.parts[peer]) for peer in peers]


@dataclass(frozen=True)
class PeerTable:
    """A table of which each rank holds as many rows as the others, in memory that all can read.

    Attributes:
        parts: the rows of each rank, [V / ranks, ...].
    """

    parts: Sequence[Tensor]

    def look_up(self, index_N: Tensor) -> Tensor:
        """The rows [N, ...] of these numbers, int64. They are copied as they are, so they may be codes."""
        num_rows = len(self.parts[0])
        owner_N, place_N = index_N // num_rows, index_N % num_rows
        found = self.parts[0][place_N]
        for rank, part in enumerate(self.parts[1:], start=1):
            is_there = (owner_N == rank).view(-1, *[1] * (part.ndim - 1))
            found = torch.where(is_there, part[place_N], found)
        return found

    def slice(self, first: int, last: int) -> Tensor:
        """Rows first to last - 1, looked up."""
        return self.look_up(torch.arange(first, last, device=self.parts[0].device))


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which other GPUs' memory is read, beside the stream that computes."""
    return torch.cuda.Stream(device)


def start_copies(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> torch.cuda.Event | None:
    """Start copies beside what is queued from now on, after what is queued already.

    Args:
        copies: destination and source of each.
        device: the GPU of the destinations. On a CPU, which tests use, the copies are done at once.

    Returns:
        What `wait_for` takes.
    """
    stream = copy_stream(device) if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for destination, source in copies:
            destination.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def wait_for(copied: torch.cuda.Event | None, device: torch.device) -> None:
    """Have the current stream wait for copies."""
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
