"""Record what a function queues for the GPU as a CUDA graph, and leave nothing behind where that fails.

While a graph is recorded nothing is computed: not even the collectives in it, in which other ranks take part. So a rank
whose recording fails has missed none, and can go on as if it had not begun, once FSDP is at rest and all memory of the
graph is free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn

from qlora_fsdp.common.text import first_line
from qlora_fsdp.runtime.fsdp_state import rest

Result = TypeVar("Result")


class NotRecorded(Exception):
    """A function can't be recorded. The message is the first line of why."""


class RecordedGraph(NamedTuple, Generic[Result]):
    """What a function queued.

    Attributes:
        graph: a single call replays it, on the same tensors.
        result: what the function returned. Its tensors are written anew each time.
        num_bytes: memory that torch has taken for it.
    """

    graph: torch.cuda.CUDAGraph
    result: Result
    num_bytes: int


def record_graph(
    compute: Callable[[], Result], pool: torch.cuda._POOL_HANDLE, model: nn.Module | None = None
) -> RecordedGraph[Result]:
    """Record what a function queues.

    Args:
        compute: reads and writes tensors that stay where they are. It must have run before, which compiles what it
            needs.
        pool: where its other tensors lie, as `torch.cuda.graph_pool_handle` names it. The graphs of a pool share this
            memory, so they are replayed one after another.
        model: what it computes with. If FSDP shards it, FSDP is brought to rest where the function raises.

    Raises:
        NotRecorded: the function or CUDA refuses, or there is no memory. What the graph has allocated is given back.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    results: list[Result] = []
    reason: str | None = None
    try:
        # The outer context sets the stream back where the inner one fails at its end. Other threads prepare batches and
        # write checkpoints meanwhile: what they ask of CUDA is not recorded.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=_stream(), capture_error_mode="thread_local"),
        ):
            try:
                results.append(compute())
            except RuntimeError as error:
                reason = first_line(error)
                if model is not None:
                    rest(model)
    except RuntimeError as error:  # of the recording's end, which says less than the error that came before
        reason = reason or first_line(error)
        with suppress(RuntimeError):  # torch's allocator may have been told already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    if reason is None:
        return RecordedGraph(graph, results[0], torch.cuda.memory_reserved() - reserved)
    del graph, results
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
