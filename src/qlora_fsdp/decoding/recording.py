"""Record what a model computes as a CUDA graph, which a single call replays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from qlora_fsdp.common.text import first_line

log = logging.getLogger("qlora_fsdp")


def record(compute: Callable[[], Any], pool: Any, what: str) -> torch.cuda.CUDAGraph | None:
    """Record a computation. If that fails, the log says why, and the result is None.

    Args:
        compute: reads and writes tensors that stay where they are. It must have run before, which compiles what it
            needs.
        pool: where its other tensors lie, which the graphs of a pool share. So they are replayed one after another.
        what: is recorded, for the log.
    """
    started, device = time.perf_counter(), torch.cuda.current_device()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may prepare batches meanwhile: what they ask of CUDA is not recorded.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            compute()
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        log.warning(
            f"Generation: no CUDA graph could be recorded, its kernels are launched one by one: {first_line(error)}"
        )
        return None
    log.info(f"Generation: {what} recorded as a CUDA graph in {time.perf_counter() - started:.1f} s")
    return graph
