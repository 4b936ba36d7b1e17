"""The training loop: the algorithm of a run, one optimizer step after another.

A step has two parts. Its passes, forward and backward of every micro-batch, make the gradient of one global batch. Its
update then changes the weights. The host queues both for the GPU and does not wait, so that the GPU always has work.
Two things happen out of order for that reason:

- A step's line of metrics.jsonl is written while the GPU computes the next step (`StepRecorder.write`).
- The next step's passes may be queued before the host has read this step's loss (`PassQueue.queue_early`). This is
  right even if the loss turns out to be infinite, because the device itself leaves the weights as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Protocol

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.criterion import LOSS, Criterion
from qlora_fsdp.config.outlook import Ends
from qlora_fsdp.config.schema import OnBadStep
from qlora_fsdp.config.specs import StepSpec
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_state import NUM_FINAL, num_averaged
from qlora_fsdp.training.bad_steps import BadSteps
from qlora_fsdp.training.batches import GlobalBatches
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.early_stop import EarlyStop, check_figure
from qlora_fsdp.training.evaluate import EvaluationResult
from qlora_fsdp.training.optim import learning_rate_at
from qlora_fsdp.training.step import StepPasses, StepRunner
from qlora_fsdp.training.step_recorder import StepRecorder


# Longer than other functions, and with more arguments, so that the whole algorithm is read in one place.
def train(
    runner: StepRunner,
    queue: StepQueue,
    num_steps: int,
    evaluation: RunEvaluation,
    recorder: StepRecorder,
    saver: Saver,
    bad_steps: BadSteps,
    spec: StepSpec,
    early_stop: EarlyStop,
    result: TrainResult,
) -> TrainResult:
    """Train up to the last step of the run. Collective.

    Args:
        runner: holds the model and the optimizer.
        queue: has the passes of each step queued.
        num_steps: of the whole run.
        evaluation: evaluates before the first step, between steps where it is due, and after the last step.
        recorder: times each step and keeps its figures.
        saver: writes checkpoints between steps.
        bad_steps: gives the norm limit to each step, and acts on a bad one: it ends the run, skips the update, or loads
            the adapter and the optimizer of the last checkpoint. The loop goes on with the next batch either way.
        spec: the learning rate, the figure that the run is judged by, and what follows a bad step.
        early_stop: says after an evaluation whether the run ends there.
        result: what earlier starts have done; it is filled in and returned.

    Raises:
        Interrupted: a rank got a signal. It is raised after the current step, or in the middle of an evaluation. A
            signal during the last step stops nothing: the run finishes.
        DataError: streamed data can't be read on; what was trained has been saved, if that was possible.
        ConfigError: the evaluations do not have the figure that the run is to be judged by.
        TrainingError: a bad step under training.on_bad_step=stop; more than 10 bad steps in a row under any setting
            (`bad_steps.MAX_IN_A_ROW`); or a trainable parameter without a usable gradient in the first steps.
    """
    may_go_back = spec.on_bad_step is OnBadStep.rollback
    runner.model.train()
    try:
        for step in range(result.num_steps, num_steps):
            if evaluation.is_due(step):
                with recorder.paused():
                    evaluated = evaluation.run(runner.model, step)
                result.add_evaluation(step, evaluated)
                if evaluated is not None and len(result.eval_losses) == 1:
                    check_figure(spec.criterion, evaluated.metrics)
                result.stopped_early = early_stop.reason(result.judged)
                if result.stopped_early is not None:
                    log.info(f"Stopped early: {result.stopped_early}.")
                    break

            recorder.begin_step()
            learning_rate = learning_rate_at(step, num_steps, spec.learning_rate, spec.optim)
            runner.set_learning_rate(learning_rate)
            try:
                passes = queue.of_step(step)
            except DataError as error:  # a stream that can't be read on, which all ranks find before the same step
                raise DataError(f"{error} {saver.save(step).text}") from error
            is_first_update = not result.losses  # of this start
            read_figures = runner.update(passes, bad_steps.limit(), is_first_update)
            recorder.queued_step()

            # The ranks agree here whether to save, before any of them waits for its GPU. The hosts make this sum, and a
            # host that waits for a rank which never arrives can name it. A GPU that waits for another GPU can't.
            must_save = runner.processes.sum([saver.wants_checkpoint()])[0] > 0
            ends_here = step + 1 == num_steps  # the adapter is written next, so no checkpoint is
            saves_next = not ends_here and saver.is_due(step + 1, must_save)
            # An evaluation or a checkpoint reads the weights as this step leaves them. A rollback changes them.
            if not (ends_here or saves_next or may_go_back or evaluation.is_due(step + 1)):
                queue.queue_early(step + 1)

            recorder.write()
            figures = read_figures()
            is_good = bad_steps.check(step, figures.loss, figures.grad_norm, passes.batch.indices, passes.micro_losses)
            result.add_step(figures.loss, figures.grad_norm, is_good)
            recorder.end_step(passes.batch, figures, is_good, learning_rate, passes.num_flops)

            if saves_next:
                with recorder.paused():
                    saver.after_step(step + 1, must_save)
        else:  # not stopped early, which is after an evaluation
            recorder.write()
            result.add_evaluation(num_steps, evaluation.run(runner.model, num_steps))
    finally:
        recorder.write()
    result.add_measured(recorder)
    return result


class StepQueue(Protocol):
    """Has the passes of every step queued once, in order: of rows of the data, or of answers that are written first."""

    def of_step(self, step: int) -> StepPasses: ...

    def queue_early(self, step: int) -> None: ...


class RunEvaluation(Protocol):
    """Evaluates between steps: losses of held-out rows, or rewards of answers to held-out prompts."""

    def is_due(self, step: int) -> bool: ...

    def run(self, model: TaskModel, step: int) -> EvaluationResult | None: ...


class PassQueue:
    """Queues the passes of every step once, in order.

    Args:
        runner: queues them.
        batches: what each step trains on.
        recorder: has the line of the step before, which is written once the GPU has work.
        first_step: the step that the run begins with.
    """

    def __init__(self, runner: StepRunner, batches: GlobalBatches, recorder: StepRecorder, first_step: int) -> None:
        self.runner = runner
        self.batches = batches
        self.recorder = recorder
        # One stream for the whole run, from which each step takes as many micro-batches as its batch has.
        self.micro_batches = runner.passes.announced(prefetch(batches.micro_batches(first_step)))
        self._early: StepPasses | DataError | None = None

    def of_step(self, step: int) -> StepPasses:
        """The passes of a step, which are queued now unless they were queued early.

        Raises:
            DataError: streamed data can't be read on; on every rank, and none has begun the step.
        """
        passes, self._early = self._early or self._queue(step), None
        if isinstance(passes, DataError):
            raise passes
        return passes

    def queue_early(self, step: int) -> None:
        """Queue the passes of the next step while this one still computes, if the runner can."""
        if self.runner.may_run_ahead:
            try:
                self._early = self._queue(step)
            except DataError as error:  # raised when it is the step's turn
                self._early = error

    def _queue(self, step: int) -> StepPasses:
        # Micro-batches may be seen one ahead, so the next step's data is there before the first of this one's runs.
        # Otherwise single ranks would meet an error in it while others wait for them in the middle of this step.
        self.batches.of_step(min(step + 1, self.batches.split.num_steps - 1))
        self.batches.seed_dropout(step)
        return self.runner.run_passes(self.micro_batches, self.batches.of_step(step), self.recorder.write)


@dataclass
class TrainResult:
    """How training went. A start is one launch of the command: a run that was resumed has had several.

    Attributes:
        num_steps: optimizer steps done, including skipped ones and those of earlier starts.
        losses: mean loss per target token of the steps of this start, without the steps whose gradient was not used.
        num_used: steps whose gradient was used, including those of earlier starts.
        first_used: (loss, gradient norm) of the first NUM_FINAL steps whose gradient was used, even if an earlier start
            ran them.
        last_used: the same of the last ones.
        eval_losses: (step, loss) of each evaluation, including those of earlier starts.
        eval_metrics: (step, the task's other figures) of the same.
        first_step_seconds: duration of the first step after this start, with compilation and allocation.
        tokens_per_second_per_gpu: median over the steps after the first.
        step_gpu_peak_gib: largest peak memory of tensors over the steps, in GiB; None on a CPU.
        adapter_step: the step whose adapter is the result, where that is not the last; None where it is.
        doubt: what its figures say against the run; None if nothing.
        stopped_early: why the run ended before its last step; None if it did not.
        criterion: the figure of the evaluations that the run is judged by.
    """

    num_steps: int = 0
    losses: list[float] = field(default_factory=list)
    num_used: int = 0
    first_used: list[tuple[float, float]] = field(default_factory=list)
    last_used: list[tuple[float, float]] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    first_step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    step_gpu_peak_gib: float | None = None
    adapter_step: int | None = None
    doubt: str | None = None
    stopped_early: str | None = None
    criterion: Criterion = field(default_factory=Criterion)

    def go_back_to(self, step: int) -> None:
        """The adapter of an earlier step is the result: what was evaluated later is not about it."""
        self.adapter_step = step
        self.eval_losses[:] = [each for each in self.eval_losses if each[0] <= step]
        self.eval_metrics[:] = [each for each in self.eval_metrics if each[0] <= step]

    def add_step(self, loss: float, norm: float, is_good: bool) -> None:
        """Count a step. Its loss and its gradient's norm count only if its gradient was used (`is_good`)."""
        self.num_steps += 1
        if is_good:
            self.losses.append(loss)
            self.num_used += 1
            self.first_used = [*self.first_used, (loss, norm)][:NUM_FINAL]
            self.last_used = [*self.last_used, (loss, norm)][-NUM_FINAL:]

    def add_earlier(self, used: Sequence[tuple[float, float]]) -> None:
        """Add (loss, gradient norm) of the steps of earlier starts whose gradient was used."""
        self.num_used = len(used)
        self.first_used = list(used[:NUM_FINAL])
        self.last_used = list(used[-NUM_FINAL:])

    @property
    def num_averaged(self) -> int:
        """Steps at either end that the initial and the final loss are means of, as in a run's folder."""
        return num_averaged(self.num_used)

    @property
    def ends(self) -> Ends | None:
        """The figures of the first and of the last steps; None if the gradient of no step was used."""
        if not self.last_used:
            return None
        first, last = self.first_used[: self.num_averaged], self.last_used[-self.num_averaged :]
        losses = fmean(loss for loss, _ in first), fmean(loss for loss, _ in last)
        norms = median(norm for _, norm in first), median(norm for _, norm in last)
        return Ends(first[0][0], losses, norms, self.eval_losses)

    def add_evaluation(self, step: int, evaluation: EvaluationResult | None) -> None:
        """Add the evaluation after `step` steps. Without held-out rows it is None, and nothing is added."""
        if evaluation is not None:
            self.eval_losses.append((step, evaluation.loss))
            self.eval_metrics.append((step, evaluation.metrics))

    @property
    def judged(self) -> dict[int, float]:
        """The figure that the run is judged by, after the number of steps of each evaluation; NaN where it has none."""
        return self.criterion.values(self.eval_losses, self.eval_metrics)

    def add_measured(self, recorder: StepRecorder) -> None:
        """Add what the recorder measured over all steps of this start."""
        self.first_step_seconds = recorder.first_step_seconds
        self.tokens_per_second_per_gpu = recorder.tokens_per_second_per_gpu
        self.step_gpu_peak_gib = recorder.step_gpu_peak_gib

    def describe(self) -> dict[str, Any]:
        """Figures for summary.json."""
        ends = self.ends
        last_metrics = self.eval_metrics[-1][1] if self.eval_metrics else {}
        judged: dict[str, Any] = {}
        if self.criterion.name != LOSS and self.eval_losses:
            judged["metric_for_best_model"] = self.criterion.name
            judged["greater_is_better"] = self.criterion.greater_is_better
            judged["metric"] = self.judged[self.eval_losses[-1][0]]
        return {
            "steps": self.num_steps,
            "initial_loss": None if ends is None else ends.losses[0],
            "final_loss": None if ends is None else ends.losses[1],
            "losses_are_means_of": self.num_averaged,
            **({} if self.adapter_step is None else {"adapter_step": self.adapter_step}),
            **({} if self.doubt is None else {"doubt": self.doubt}),
            **({} if self.stopped_early is None else {"stopped_early": self.stopped_early}),
            "initial_eval_loss": self.eval_losses[0][1] if self.eval_losses else None,
            "eval_loss": self.eval_losses[-1][1] if self.eval_losses else None,
            **({"eval_metrics": last_metrics} if last_metrics else {}),
            **judged,
            "first_step_seconds": self.first_step_seconds,
            "step_gpu_peak_gib": self.step_gpu_peak_gib,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
        }
