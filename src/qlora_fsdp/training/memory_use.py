"""The GPU memory that a run really takes, phase by phase, and the message of a run that needed more than there was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qlora_fsdp.common.errors import MemoryShortage
from qlora_fsdp.common.files import replacing
from qlora_fsdp.memory.gpus import Gpu
from qlora_fsdp.memory.plan import GIB, PHASES, MemoryPlan
from qlora_fsdp.memory.search import largest_savings
from qlora_fsdp.runtime.hardware import is_host_shortage, quote_shortage

SNAPSHOT_ENTRIES = 200_000  # the last ones, which a snapshot has
SHORT_IN_A_ROW = 3  # micro-batches in a row that must be short of memory before less is kept
HOST_ADVICE = (
    "See in `free -g` what else holds the host's memory, ask the batch system for more of it, or start fewer processes"
)
log = logging.getLogger("qlora_fsdp")


@dataclass
class PhasePeaks:
    """Peaks of a GPU's memory by phase, as torch's allocator counts them. On a CPU there are none.

    Attributes:
        allocated: most bytes that tensors held, by phase.
        reserved: most bytes that the allocator held, by phase.
        now: the phase that runs.
        num_retries: how often the allocator found room only after it had given back what it keeps.
        fall_back: called before a forward pass when memory was short in several micro-batches in a row. Memory is
            short when the allocator finds room only after it has given back what it keeps. It waits for the GPU each
            time, and in the end the gaps between tensors may be too small for what comes.
    """

    device: torch.device
    fall_back: Callable[[], None] | None = None
    allocated: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    now: str = PHASES[0]
    num_retries: int = field(default=0, init=False)
    _num_retries_before: int = field(default=0, init=False)  # at the last forward pass
    _num_short: int = field(default=0, init=False)  # micro-batches in a row that were short of memory

    def enter(self, phase: str) -> None:
        """Record the phase that ends, and begin another. This asks the allocator, and does not wait for the GPU."""
        self.record()
        self.now = phase
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if phase == "forward" and self.fall_back is not None:
            self._num_short = self._num_short + 1 if self.num_retries > self._num_retries_before else 0
            self._num_retries_before = self.num_retries
            if self._num_short == SHORT_IN_A_ROW:
                self._num_short = 0
                self.fall_back()

    def record(self) -> None:
        """Record the peak of the phase that runs, up to now."""
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            self.num_retries = int(stats["num_alloc_retries"])
            for peaks, key in ((self.allocated, "allocated_bytes"), (self.reserved, "reserved_bytes")):
                peaks[self.now] = max(peaks.get(self.now, 0), int(stats[key]["all"]["peak"]))

    def peak_gib(self, *phases: str) -> float | None:
        """The highest of these phases' peaks of `allocated`; None on a CPU."""
        found = [self.allocated[phase] for phase in phases if phase in self.allocated]
        return max(found) / GIB if found else None

    def as_json(self) -> dict[str, Any]:
        """GiB by phase; GiB outside torch's allocator, which CUDA and other processes hold; the allocator's retries."""
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        return {
            name: {phase: round(size / GIB, 3) for phase, size in peaks.items()}
            for name, peaks in (("tensors_gib", self.allocated), ("reserved_gib", self.reserved))
        } | {"outside_gib": round(outside / GIB, 3), "num_alloc_retries": self.num_retries}


def start_snapshot(device: torch.device) -> None:
    """Have torch record allocations from now on, with the lines of Python that made them."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)


def explain_early_shortage(error: BaseException, writes_cache: bool) -> MemoryShortage:
    """The error for a GPU that is out of memory before the model is loaded, when there may be no plan yet.

    Args:
        error: torch's own.
        writes_cache: one rank per node may be quantizing weights for model.cache_quantized.
    """
    text = f"{quote_shortage(error)}, before the model is loaded. "
    text += HOST_ADVICE if is_host_shortage(error) else "See in nvidia-smi what else holds its memory"
    text += ", or set model.cache_quantized=false, which takes some GiB less here." if writes_cache else "."
    return MemoryShortage(f"{text}\nCheckpoints are as they were.")


def explain_shortage(
    error: BaseException, plan: MemoryPlan | None, gpu: Gpu | None, peaks: PhasePeaks, snapshot: Path | None
) -> MemoryShortage:
    """The error for a GPU that is out of memory: the plan beside what was allocated, and what would help most.

    Args:
        error: torch's own.
        plan: the memory plan of this run; None where there is none.
        gpu: the GPU whose speed the suggestions are calculated for; None: there are no suggestions.
        peaks: what was allocated so far.
        snapshot: the file to write torch's record of allocations to; None: it is not written.
    """
    peaks.record()
    lines = [f"{quote_shortage(error)}, in {peaks.now}."]
    if is_host_shortage(error) and peaks.device.type == "cuda":  # the plan is of the GPU's memory
        lines.append(f"{HOST_ADVICE}.")
    elif plan is not None:
        lines += _phases(plan, peaks)
        lines.append("What would help most, by the plan:")
        for change in largest_savings(plan, gpu)[:3] if gpu is not None else []:
            lines.append(f"  {change.text}: {change.saved / GIB:.2f} GiB less a GPU, {change.speed:,.0f} tokens/s")
        lines.append("  or more GPUs")
    else:
        lines.append("Set training.micro_batch_size or training.max_length lower, memory=offload, or fsdp=offload.")
    if snapshot is not None:
        lines.append(_write_snapshot(snapshot))
    lines.append("Checkpoints are as they were.")
    return MemoryShortage("\n".join(lines))


def _phases(plan: MemoryPlan, peaks: PhasePeaks) -> list[str]:
    lines = [f"  {'GiB':<10}{'planned':>10}{'tensors':>10}{'reserved':>10}"]
    for phase in plan.phases:
        cells = [f"{plan.tensor_bytes(phase) / GIB:.2f}"]
        cells += [f"{peak[phase] / GIB:.2f}" if phase in peak else "-" for peak in (peaks.allocated, peaks.reserved)]
        lines.append(f"  {phase:<10}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _write_snapshot(file: Path) -> str:
    try:
        with replacing(file) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    except (OSError, RuntimeError) as error:
        return f"{file} can't be written: {error}."
    return f"Allocations are in {file}: open it at pytorch.org/memory_viz."
