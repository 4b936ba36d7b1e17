"""What is recorded about each step: how long it took, and its line of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from qlora_fsdp.records.journal import Journal
from qlora_fsdp.runtime.hardware import host_rss_gib, peak_flops
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.batches import GlobalBatch
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.step import StepFigures

STEP_PHASES = ("forward", "backward", "step")


class DeferredReport:
    """The figures of the last step, until the host has time to write them: while the GPU computes the next step."""

    def __init__(self, journal: Journal, peaks: PhasePeaks) -> None:
        self.journal, self.peaks = journal, peaks
        self._figures: dict[str, Any] | None = None

    def hold(self, figures: dict[str, Any]) -> None:
        """Keep these figures for the next `write`."""
        self._figures = figures

    def write(self) -> None:
        """Write the figures that are held, if there are any, with the memory that steps have taken so far."""
        figures, self._figures = self._figures, None
        if figures is None:
            return
        self.peaks.record()
        step_peak = self.peaks.peak_gib(*STEP_PHASES)
        memory = {
            "gpu_peak_gib": None if step_peak is None else round(step_peak, 3),
            "host_rss_gib": round(host_rss_gib(), 3),
        }
        self.journal.step(figures | memory)


class StepRecorder:
    """Times the steps and puts their figures together.

    The time of a step reaches from the end of the step before it to its own, so that nothing between two steps is
    left out, except for evaluations and checkpoints.
    """

    def __init__(self, journal: Journal, peaks: PhasePeaks, processes: Processes) -> None:
        self.peaks, self.num_ranks = peaks, processes.num_ranks
        self.peak_flops = peak_flops(processes.device)
        self.deferred = DeferredReport(journal, peaks)
        self.first_step_seconds: float | None = None
        self._speeds: list[float] = []  # tokens per second and GPU of each step after the first
        self._started: float | None = None  # None: other work came between the last step and the next

    def begin_step(self) -> None:
        """Start the clock, unless it runs since the end of the step before."""
        self._started = self._started or time.perf_counter()

    def end_step(
        self, batch: GlobalBatch, measured: StepFigures, is_good: bool, learning_rate: float, num_flops: float
    ) -> None:
        """Take the time of a step, and hold its figures for a later report.

        `is_good` says whether the gradient was used, and `num_flops` are the model FLOPs of this rank's micro-batches.
        """
        assert self._started is not None
        ended = time.perf_counter()
        seconds, self._started = ended - self._started, ended
        speed = batch.num_tokens / seconds
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        else:
            self._speeds.append(speed / self.num_ranks)
        figures = {
            "step": batch.step + 1,
            "epoch": round(batch.epoch, 4),
            "loss": _finite(measured.loss),
            "grad_norm": _finite(measured.grad_norm),
            **({} if is_good else {"skipped": True}),
            "learning_rate": learning_rate,
            "num_tokens": batch.num_tokens,
            "num_target_tokens": batch.num_targets,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(speed, 1),
            "tokens_per_second_per_gpu": round(speed / self.num_ranks, 1),
            "mfu": None if self.peak_flops is None else round(num_flops / seconds / self.peak_flops, 4),
        }
        figures |= {name: _finite(value) for name, value in measured.metrics.items()}
        if measured.max_expert_load is not None:
            figures["max_expert_load"] = round(measured.max_expert_load, 4)
        self.deferred.hold(figures)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work between two steps, such as an evaluation, whose time is no part of a step.

        The last step's figures are written first, so that lines are in the order in which things happened.
        """
        self.deferred.write()
        yield
        self._started = None

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Median over the steps after the first."""
        return float(np.median(self._speeds)) if self._speeds else None

    @property
    def step_gpu_peak_gib(self) -> float | None:
        """The most memory that tensors took in any step; None on a CPU."""
        return self.peaks.peak_gib(*STEP_PHASES)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
