"""The evaluations: the loss on held-out rows, before, between and after the steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.batches import micro_batches_of
from qlora_fsdp.training.capture.passes import Passes
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.generations import Generations
from qlora_fsdp.training.memory_use import PhasePeaks


@dataclass(frozen=True)
class EvaluationResult:
    """The mean loss over all target tokens, and the task's other figures by name."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a training run.

    Attributes:
        data: the held-out rows, all of them on every rank; None: there is nothing to evaluate on.
        every_steps: evaluate every so many steps; None: only before the first step and after the last.
        passes: computes the losses.
        generations: completes some of the rows after each evaluation.
        saver: knows of signals, and stops the run where one arrives during an evaluation.
    """

    data: Sequences | None
    every_steps: int | None
    split: BatchSplit
    passes: Passes
    generations: Generations
    processes: Processes
    peaks: PhasePeaks
    journal: Journal
    saver: Saver

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` optimizer steps, if these are not all."""
        return step == 0 or (self.every_steps is not None and step % self.every_steps == 0)

    def run(self, model: TaskModel, step: int) -> EvaluationResult | None:
        """Evaluate after `step` optimizer steps, and record what was found; None without held-out rows.

        Raises:
            Interrupted: a rank got a signal to stop.
        """
        if self.data is None:
            return None
        self.peaks.enter("evaluation")
        started = time.perf_counter()
        found = evaluate(model, self.data, self.split, self.passes, self.processes, self.saver.is_signalled)
        if found is None:
            self.saver.stop(step)
        self.journal.evaluation(step, found.loss, found.metrics, time.perf_counter() - started)
        self.journal.generations(step, self.generations.complete(model))
        return found


@torch.no_grad()
def evaluate(
    model: TaskModel,
    data: Sequences,
    split: BatchSplit,
    passes: Passes,
    processes: Processes,
    is_stopped: Callable[[], bool] = lambda: False,
) -> EvaluationResult | None:
    """Loss and metrics over all of `data`, which the ranks share.

    Args:
        model: sharded and loaded.
        data: all of it on every rank.
        split: how sequences spread over ranks and micro-batches.
        passes: computes the losses.
        processes: all ranks take part.
        is_stopped: asked before each micro-batch; it must answer the same on every rank. If it is true, the evaluation
            ends and the result is None.
    """
    everything = np.arange(len(data))
    loss_sum = torch.zeros((), dtype=torch.float32, device=processes.device)
    stopped = False
    model.forget_outputs()
    with model.without_dropout():
        if model.looks_ahead:
            with closing(prefetch(micro_batches_of(data, everything, split, processes.rank))) as batches:
                model.look_ahead(batches, processes)
            free_gathered(model)  # a recorded micro-batch gathers the root itself
        with closing(prefetch(micro_batches_of(data, everything, split, processes.rank))) as batches:
            for batch in batches:
                if stopped := is_stopped():
                    break
                loss_sum += passes.evaluate(batch)
    free_gathered(model)
    if stopped:
        return None
    loss = processes.sum([loss_sum.item()])[0] / max(1, data.num_target_tokens(everything))
    return EvaluationResult(loss, model.take_metrics(processes))
