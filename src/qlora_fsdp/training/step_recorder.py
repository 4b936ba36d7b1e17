"""What is recorded about each step: how long it took, and its line of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qlora_fsdp.common.text import finite_or_none
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.runtime.hardware import host_rss_gib, peak_flops
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.batches import GlobalBatch
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.step import StepFigures

STEP_PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class _Done:
    """A step whose line is yet to be written. The attributes are those of `end_step`, and when it began and ended."""

    began: Moment
    ended: Moment
    batch: GlobalBatch
    measured: StepFigures
    is_good: bool
    learning_rate: float
    num_flops: float


class StepRecorder:
    """Times the steps, and writes a line of metrics.jsonl for each.

    The time of a step reaches from the end of the step before it to its own, so that nothing between two steps is
    left out, except for evaluations and checkpoints. It is the GPU's time (`Moment`): the host may have queued the next
    step already, or still record its graph, when the GPU comes to the end of this one.

    The line of a step is written while the GPU computes the next one, when the host has time for it.
    """

    def __init__(self, journal: Journal, peaks: PhasePeaks, processes: Processes) -> None:
        self.journal, self.peaks = journal, peaks
        self.num_ranks, self.device = processes.num_ranks, processes.device
        self.peak_flops = peak_flops(processes.device)
        self.first_step_seconds: float | None = None
        self._speeds: list[float] = []  # tokens per second and GPU of each step after the first
        self._began: Moment | None = None  # None: other work came between the last step and the next
        self._ended: Moment | None = None
        self._done: _Done | None = None

    def begin_step(self) -> None:
        """Start the clock, unless it runs since the end of the step before."""
        self._began = self._began or Moment(self.device)

    def queued_step(self) -> None:
        """Let the clock stop when the device is done with the step, all of which is queued now."""
        self._ended = Moment(self.device)

    def end_step(
        self, batch: GlobalBatch, measured: StepFigures, is_good: bool, learning_rate: float, num_flops: float
    ) -> None:
        """Keep the figures of a step for `write`.

        `is_good` says whether the gradient was used, and `num_flops` are the model FLOPs of this rank's micro-batches.
        """
        assert self._began is not None and self._ended is not None
        self._done = _Done(self._began, self._ended, batch, measured, is_good, learning_rate, num_flops)
        self._began = self._ended

    def write(self) -> None:
        """Write the line of the last step, unless that is done, with the memory that steps have taken so far."""
        done, self._done = self._done, None
        if done is None:
            return
        seconds = done.ended.seconds_since(done.began)
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        else:
            self._speeds.append(done.batch.num_tokens / seconds / self.num_ranks)
        self.peaks.record()
        step_peak = self.step_gpu_peak_gib
        memory = {
            "gpu_peak_gib": None if step_peak is None else round(step_peak, 3),
            "host_rss_gib": round(host_rss_gib(), 3),
        }
        self.journal.step(self._figures(done, seconds) | memory)

    def _figures(self, done: _Done, seconds: float) -> dict[str, Any]:
        batch, measured = done.batch, done.measured
        speed = batch.num_tokens / seconds
        figures = {
            "step": batch.step + 1,
            "epoch": None if batch.epoch is None else round(batch.epoch, 4),
            "loss": finite_or_none(measured.loss),
            "grad_norm": finite_or_none(measured.grad_norm),
            **({} if done.is_good else {"skipped": True}),
            "learning_rate": done.learning_rate,
            "num_tokens": batch.num_tokens,
            "num_target_tokens": batch.num_targets,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(speed, 1),
            "tokens_per_second_per_gpu": round(speed / self.num_ranks, 1),
            "mfu": None if self.peak_flops is None else round(done.num_flops / seconds / self.peak_flops, 4),
        }
        told = {**batch.figures, **measured.metrics}
        figures |= {name: finite_or_none(value) for name, value in told.items() if name not in figures}
        if measured.max_expert_load is not None:
            figures["max_expert_load"] = round(measured.max_expert_load, 4)
        return figures

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work between two steps, such as an evaluation, whose time is no part of a step.

        The last step's figures are written first, so that lines are in the order in which things happened.
        """
        self.write()
        yield
        self._began = None

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Median over the steps after the first."""
        return float(np.median(self._speeds)) if self._speeds else None

    @property
    def step_gpu_peak_gib(self) -> float | None:
        """The most memory that tensors took in any step; None on a CPU."""
        return self.peaks.peak_gib(*STEP_PHASES)


class Moment:
    """The time at which the device is done with all that is queued now.

    Queued work is done later than it is queued, by up to a step where the host runs ahead. So a GPU notes the time
    itself, by a CUDA event in the current stream. On a CPU, which queues nothing, it is the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between an earlier moment of the same device and this one. A host that is ahead of it waits."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        self._event.synchronize()
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000
