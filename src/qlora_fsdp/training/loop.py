"""The training loop: global batches in the order of the epoch, micro-batches of this rank, one optimizer step each.

The loss of a step is the sum over all its target tokens divided by their number, over all micro-batches and ranks, so
the same data gives the same loss however it is split. The divisor is known before the first micro-batch: every rank
sees the whole order and the lengths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.config.schema import Config
from qlora_fsdp.data.batch import Batch, collate, micro_batch_indices
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.data.sequences import Indices, Sequences, TrainingData
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.model.count import FlopCounter
from qlora_fsdp.model.shard import free_gathered, reduce_gradients, sum_gradients
from qlora_fsdp.model.task_model import TaskModel
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.runtime.hardware import host_rss_gib, peak_flops
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.bad_steps import BadSteps
from qlora_fsdp.training.generations import Generations
from qlora_fsdp.training.gradient_check import check_gradients
from qlora_fsdp.training.memory_use import PhasePeaks
from qlora_fsdp.training.optim import learning_rate_at, measure_step
from qlora_fsdp.training.saver import Saver

GRADIENT_CHECK_STEPS = 2  # after the second step LoRA's A has a gradient too
STEP_PHASES = ("forward", "backward", "step")


@dataclass
class TrainResult:
    """How training went.

    Attributes:
        num_steps: optimizer steps done, those before a resumption included.
        losses: mean loss of each step that was taken here.
        last_loss: of the last step that was taken, also before a resumption.
        eval_losses: (step, loss) of each evaluation.
        eval_metrics: the task's other figures in the last evaluation.
        first_step_seconds: of the first step, compilation and allocation included.
        tokens_per_second_per_gpu: median over the steps after the first.
        step_gpu_peak_gib: most memory in any step.
    """

    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    last_loss: float | None = None
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_metrics: dict[str, float] = field(default_factory=dict)
    first_step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_gpu_peak_gib: float | None = None


def train(
    model: TaskModel,
    optimizer: torch.optim.Optimizer,
    train_data: TrainingData,
    eval_data: Sequences | None,
    config: Config,
    split: BatchSplit,
    flops: FlopCounter,
    processes: Processes,
    journal: Journal,
    saver: Saver,
    bad_steps: BadSteps,
    peaks: PhasePeaks,
    generations: Generations,
    result: TrainResult,
) -> TrainResult:
    """Train for `split.num_steps` steps.

    Args:
        model: sharded, loaded and proven.
        optimizer: over the model's trainable parameters; its learning rate is set here at each step.
        train_data: all of it on every rank.
        eval_data: the same; None: no evaluation.
        config: `training` and `optim` are used.
        split: how the sequences of a step spread over ranks and micro-batches.
        flops: counts the operations of a batch, for `mfu`.
        processes: all ranks take part.
        journal: gets a line for each step and each evaluation.
        saver: is asked after each optimizer step.
        bad_steps: judges each gradient before it is used.
        peaks: told which phase runs.
        generations: completes held-out rows after each evaluation.
        result: what was done before: nothing, or what a checkpoint has, which model and optimizer are loaded from.

    Returns:
        `result`, filled in.

    Raises:
        Interrupted: a signal on any rank, at the end of the step.
        TrainingError: a bad step under training.on_bad_step=stop, or a parameter without a gradient in the first steps.
    """
    peak = peak_flops(processes.device)
    params = [p for p in model.parameters() if p.requires_grad]
    first_step, eval_every, speeds = result.num_steps, config.training.eval_every_steps, []
    report = _Later()  # a step's figures, told while the GPU computes the next step
    started: float | None = None  # the end of the step before; None after other work

    def evaluate_after(step: int) -> None:
        report()
        if eval_data is not None:
            peaks.enter("evaluation")
            begun = time.perf_counter()
            found = evaluate(model, eval_data, split, processes, saver.is_signalled)
            if found is None:
                saver.stop(step)
            loss, result.eval_metrics = found
            result.eval_losses.append((step, loss))
            journal.evaluation(step, loss, result.eval_metrics, time.perf_counter() - begun)
            journal.generations(step, generations.complete(model))

    model.train()
    batches = prefetch(_batches(train_data, config, split, processes.rank, first_step))
    try:
        for step in range(first_step, split.num_steps):
            if step == 0 or (eval_every is not None and step % eval_every == 0):
                evaluate_after(step)
                started = None
            started = started or time.perf_counter()
            _seed_dropout(config.training.seed, step, processes.rank)
            learning_rate = learning_rate_at(step, split.num_steps, config.training.learning_rate, config.optim)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            indices = _global_batch(train_data, config.training.seed, step, split)
            num_targets, num_tokens = train_data.num_target_tokens(indices), int(train_data.lengths_of(indices).sum())
            local_loss, micro_losses, local_flops = _run_micro_batches(
                model, batches, split.num_micro_batches(len(indices)), max(1, num_targets), flops, peaks, report
            )
            peaks.enter("step")
            sum_gradients(model, params)
            outcome = measure_step(params, config.optim.max_grad_norm, local_loss, bad_steps.limit())
            if step < GRADIENT_CHECK_STEPS and not outcome.is_bad.item():
                _stop_on_bad_gradients(model, step, not result.losses, processes)
            optimizer.found_inf = outcome.is_bad  # type: ignore[attr-defined]  # torch's name: then nothing is changed
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # The hosts meet before they wait for their GPUs: one that does not come is noticed here, and named.
            is_asked = processes.sum([saver.asks()])[0] > 0
            loss, norm = outcome.wait()  # for backward; the optimizer may still run
            is_good = bad_steps.check(step, loss, norm, indices, micro_losses)
            ended = time.perf_counter()
            seconds, started = ended - started, ended
            result.num_steps, result.first_step_seconds = step + 1, result.first_step_seconds or seconds
            if is_good:
                result.losses.append(loss)
                result.last_loss = loss
            speed = num_tokens / seconds
            if step > first_step:
                speeds.append(speed / processes.num_ranks)
            figures = {
                "step": step + 1,
                "epoch": round((step + 1) * split.global_batch_size / len(train_data), 4),
                "loss": loss if math.isfinite(loss) else None,
                "grad_norm": norm if math.isfinite(norm) else None,
                **({} if is_good else {"skipped": True}),
                "learning_rate": learning_rate,
                "num_tokens": num_tokens,
                "num_target_tokens": num_targets,
                "seconds": round(seconds, 4),
                "tokens_per_second": round(speed, 1),
                "tokens_per_second_per_gpu": round(speed / processes.num_ranks, 1),
                "mfu": None if peak is None else round(local_flops / seconds / peak, 4),
            }
            report.task = partial(_report, figures, journal, peaks)
            is_last = step + 1 == split.num_steps  # then the adapter is about to be written
            if not is_last and saver.is_due(step + 1, is_asked):
                report()
                saver.after_step(step + 1, is_asked)
                started = None
    finally:
        report()
    evaluate_after(split.num_steps)
    result.step_gpu_peak_gib = peaks.peak_gib(*STEP_PHASES)
    result.tokens_per_second_per_gpu = float(np.median(speeds)) if speeds else None
    return result


class _Later:
    """Something that the host has to do, once, when it has time."""

    task: Callable[[], None] | None = None

    def __call__(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task()


def _report(figures: dict[str, Any], journal: Journal, peaks: PhasePeaks) -> None:
    peaks.record()
    step_peak = peaks.peak_gib(*STEP_PHASES)
    memory = {
        "gpu_peak_gib": None if step_peak is None else round(step_peak, 3),
        "host_rss_gib": round(host_rss_gib(), 3),
    }
    journal.step(figures | memory)


def _run_micro_batches(
    model: TaskModel,
    batches: Iterator[Batch],
    num_micro_batches: int,
    num_targets: int,
    flops: FlopCounter,
    peaks: PhasePeaks,
    meanwhile: Callable[[], None],
) -> tuple[Tensor, list[Tensor], float]:
    """Forward and backward of a step; gradients are reduced once, with the last micro-batch.

    `meanwhile` is called when the GPU has work for some time.

    Returns:
        This rank's part of the step's loss, a scalar on the device; that of each micro-batch; and the FLOPs. Nothing
        waits for the device.
    """
    loss_sum, num_flops = torch.zeros((), dtype=torch.float32, device=peaks.device), 0.0
    losses = []
    for micro in range(num_micro_batches):
        batch = next(batches)
        num_flops += flops.of_batch(batch.sequence_starts)
        reduce_gradients(model, now=micro == num_micro_batches - 1)
        peaks.enter("forward")
        loss = model(batch.to(peaks.device)) / num_targets
        peaks.enter("backward")
        loss.backward()
        losses.append(loss.detach())
        loss_sum += losses[-1]
        del loss  # and its graph, before the next one grows
        meanwhile()
    return loss_sum, losses, num_flops


@torch.no_grad()
def evaluate(
    model: TaskModel,
    data: Sequences,
    split: BatchSplit,
    processes: Processes,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, dict[str, float]] | None:
    """Mean loss over all targets of `data`, shared among ranks, and the task's other figures.

    None if `is_stopped` said so, the same on every rank, before a micro-batch.
    """
    was_training = model.training
    model.eval()
    everything = np.arange(len(data))
    loss_sum = torch.zeros((), dtype=torch.float32, device=processes.device)
    stopped = False
    with closing(prefetch(_micro_batches(data, everything, split, processes.rank))) as batches:
        for batch in batches:
            if stopped := is_stopped():
                break
            loss_sum += model(batch.to(processes.device))
    model.train(was_training)
    free_gathered(model)
    if stopped:
        return None
    loss = processes.sum([loss_sum.item()])[0] / max(1, data.num_target_tokens(everything))
    return loss, model.take_metrics(processes)


def _global_batch(data: TrainingData, seed: int, step: int, split: BatchSplit) -> Indices:
    """Sequences of a step: the next `global_batch_size`; the last step of a run may have fewer."""
    first = step * split.global_batch_size
    return data.order(first, min(first + split.global_batch_size, split.num_sequences), seed)


def _seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make what is drawn in a step a function of the step, so that a resumed run draws the same."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))


def _batches(data: TrainingData, config: Config, split: BatchSplit, rank: int, first_step: int) -> Iterator[Batch]:
    for step in range(first_step, split.num_steps):
        indices = _global_batch(data, config.training.seed, step, split)
        yield from _micro_batches(data, indices, split, rank)


def _micro_batches(data: TrainingData, indices: Indices, split: BatchSplit, rank: int) -> Iterator[Batch]:
    size = split.micro_batch_size
    for micro in micro_batch_indices(indices, rank=rank, num_ranks=split.num_ranks, micro_batch_size=size):
        yield collate(data, micro, micro_batch_size=size)


def _stop_on_bad_gradients(model: TaskModel, step: int, is_first: bool, processes: Processes) -> None:
    problems = check_gradients(model.model, is_first, processes.sum, model.may_get_zero_gradient)
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:10])
        raise TrainingError(
            f"{len(problems)} parameters that should be trained got no usable gradient in step {step + 1}. Take their "
            f"layers out of lora.target_modules or lora.modules_to_save, or check the data:\n{shown}"
        )


def describe(result: TrainResult) -> dict[str, Any]:
    """The result's lines in summary.json."""
    return {
        "steps": result.num_steps,
        "final_loss": result.last_loss,
        "initial_eval_loss": result.eval_losses[0][1] if result.eval_losses else None,
        "eval_loss": result.eval_losses[-1][1] if result.eval_losses else None,
        **({"eval_metrics": result.eval_metrics} if result.eval_metrics else {}),
        "first_step_seconds": result.first_step_seconds,
        "step_gpu_peak_gib": result.step_gpu_peak_gib,
        "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
    }
