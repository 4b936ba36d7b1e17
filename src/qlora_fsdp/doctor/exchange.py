"""Measures how fast several processes exchange data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from qlora_fsdp.doctor.finding import Finding

if TYPE_CHECKING:
    from qlora_fsdp.runtime.processes import Processes

REPEATS = 3
EXCHANGED_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


def check_exchange(processes: Processes) -> Iterator[Finding]:
    """The rates of exchanges between the processes, counted as NCCL's own tests count them.

    Gradients are summed by all-reduce, layers gathered, and ranks that share sequences exchange heads by all-to-all.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    from qlora_fsdp.runtime.rows import gather_rows

    device, size = processes.device, processes.num_ranks
    num_bytes = EXCHANGED_BYTES[device.type] // size * size
    whole = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    part = torch.ones(num_bytes // 2 // size, dtype=torch.bfloat16, device=device)
    sent = whole[: len(part) * size]  # as much to each
    received = torch.empty_like(sent)
    exchanges: dict[str, tuple[float, Callable[[], object]]] = {
        "all-reduce": (2 * (size - 1) / size, lambda: dist.all_reduce(whole)),
        "all-gather": ((size - 1) / size, lambda: gather_rows(part, len(whole), dist.group.WORLD)),
        "all-to-all": ((size - 1) / size, lambda: dist.all_to_all_single(received, sent)),
    }
    for name, (factor, exchange) in exchanges.items():
        # Two calls before those that are timed warm it up.
        seconds = Timer("exchange()", globals={"exchange": exchange}).timeit(REPEATS).mean
        rate = num_bytes * factor / seconds / 1e9
        found = f"{rate:.1f} GB/s between {size} processes ({device.type})"
        slow = device.type == "cuda" and rate < 5
        advice = "Slow: look for NVLink or InfiniBand in NCCL_DEBUG=INFO." if slow else ""
        yield Finding("yellow" if slow else "green", name, found, advice)
