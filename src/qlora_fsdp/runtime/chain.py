"""Ranks in a chain: each has some of a model's layers, and hands what they compute to the next one.

On GPUs the calls are NCCL's on the stream that computes, so a CUDA graph can record them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from qlora_fsdp.runtime.processes import Processes


class Chain:
    """This rank's place among all ranks. All of them make the same calls in the same order."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.rank, self.num_ranks = processes.rank, processes.num_ranks

    @property
    def is_first(self) -> bool:
        """Whether no rank stands before this one."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether no rank stands behind this one."""
        return self.rank == self.num_ranks - 1

    def send(self, tensor: Tensor) -> None:
        """Hand a tensor to the next rank, which calls `receive`."""
        dist.send(tensor.contiguous(), self.rank + 1)

    def receive(self, like: Tensor) -> Tensor:
        """The tensor that the rank before sends, of the shape and dtype of `like`."""
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(received, self.rank - 1)
        return received

    def share_last(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the last rank."""
        dist.broadcast(tensor, self.num_ranks - 1)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return -int(self.processes.max([-number])[0])
