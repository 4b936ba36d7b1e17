"""Record what a function queues for the GPU as a CUDA graph, and leave nothing behind where that fails.

While a graph is recorded nothing is computed: not even the collectives in it, in which other ranks take part. So a rank
whose recording fails has missed none, and can go on as if it had not begun, once FSDP is at rest and all memory of the
graph is free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from qlora_fsdp.common.text import first_line
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.runtime.fsdp_state import rest
from qlora_fsdp.training.capture.batch_key import fill


class NotRecorded(Exception):
    """A micro-batch can't be recorded. The message is the first line of why."""


@dataclass(frozen=True)
class Recorded:
    """A recorded micro-batch.

    Attributes:
        batch: the tensors on the device that the graph reads.
        graph: what is replayed.
        loss: the tensor that the graph writes.
        num_bytes: memory that torch has taken for it.
    """

    batch: Batch
    graph: torch.cuda.CUDAGraph
    loss: Tensor
    num_bytes: int

    def run(self, batch: Batch) -> Tensor:
        """Replay the graph with a micro-batch, and return its loss."""
        fill(self.batch, batch)
        self.graph.replay()
        return self.loss.clone()


def record(
    compute: Callable[[Batch], Tensor], batch: Batch, model: nn.Module, pool: torch.cuda._POOL_HANDLE
) -> Recorded:
    """Record what a function queues for a micro-batch.

    Args:
        compute: queues kernels, and keeps no tensors but the loss that it returns.
        batch: on the device, with room for others.
        model: what it computes with. If FSDP shards it, FSDP is brought to rest where the function raises.
        pool: the memory of the graph, as `torch.cuda.graph_pool_handle` names it.

    Raises:
        NotRecorded: the function or CUDA refuses, or there is no memory. What the graph has allocated is given back.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph, loss, reason, before = torch.cuda.CUDAGraph(), None, None, torch.cuda.memory_reserved()
    try:
        # The outer context sets the stream back where the inner one fails at its end. Other threads prepare batches and
        # write checkpoints meanwhile: what they ask of CUDA is not recorded.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=_stream(), capture_error_mode="thread_local"),
        ):
            try:
                loss = compute(batch)
            except RuntimeError as error:
                reason = first_line(error)
                rest(model)
    except RuntimeError as error:  # of the recording's end, which says less than the error that came before
        reason = reason or first_line(error)
        with suppress(RuntimeError):  # torch's allocator may have been told already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    if reason is None and loss is not None:
        return Recorded(batch, graph, loss, torch.cuda.memory_reserved() - before)
    del graph, loss
    free_graphs()
    raise NotRecorded(reason)


@cache
def _stream() -> torch.cuda.Stream:
    """The stream that is recorded. Kernels on it go before those that run beside it (weight_reader.py)."""
    return torch.cuda.Stream(priority=-1)


def free_graphs() -> None:
    """Give back the memory of graphs that nobody holds any more."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
