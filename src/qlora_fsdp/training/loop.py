"""The training loop: one global batch after another in the order of the epoch, one optimizer step for each."""

from __future__ import annotations

import numpy as np
import torch

from qlora_fsdp.config.schema import Config, OnBadStep
from qlora_fsdp.data.prefetch import prefetch
from qlora_fsdp.training.bad_steps import BadSteps
from qlora_fsdp.training.batches import GlobalBatches
from qlora_fsdp.training.evaluate import Evaluation
from qlora_fsdp.training.optim import learning_rate_at
from qlora_fsdp.training.saver import Saver
from qlora_fsdp.training.step import StepPasses, StepRunner
from qlora_fsdp.training.step_recorder import StepRecorder
from qlora_fsdp.training.train_result import TrainResult


def train(
    runner: StepRunner,
    batches: GlobalBatches,
    evaluation: Evaluation,
    recorder: StepRecorder,
    saver: Saver,
    bad_steps: BadSteps,
    config: Config,
    result: TrainResult,
) -> TrainResult:
    """Train up to the last step of the run.

    Args:
        runner: holds the model and the optimizer.
        batches: what each step trains on.
        evaluation: evaluates before the first step, between steps where it is due, and after the last step.
        recorder: times each step and keeps its figures, which are written while the GPU computes the next step.
        saver: writes checkpoints between steps.
        bad_steps: gives the norm limit to each step, and acts on a bad one: it ends the run, skips the update, or loads
            the adapter and the optimizer of the last checkpoint. The loop goes on with the next batch either way.
        config: `training` and `optim` are used.
        result: what earlier starts have done. It is filled in and returned.

    Raises:
        Interrupted: a rank got a signal. It is raised after the current step, or in the middle of an evaluation. A
            signal during the last step stops nothing: the run finishes.
        TrainingError: a bad step under training.on_bad_step=stop; more than 10 bad steps in a row under any setting
            (`bad_steps.MAX_IN_A_ROW`); or a trainable parameter without a usable gradient in the first steps.
    """
    model, processes, num_steps = runner.model, runner.processes, batches.split.num_steps
    model.train()
    # One stream for the whole run. A step takes as many micro-batches from it as its batch says.
    micro_batches = prefetch(batches.micro_batches(first_step=result.num_steps))
    ahead: StepPasses | None = None  # of the next step, if they are queued

    def run_passes(step: int) -> StepPasses:
        _seed_dropout(config.training.seed, step, processes.rank)
        # The line of the step before is written while the GPU computes.
        return runner.run_passes(micro_batches, batches.of_step(step), recorder.deferred.write)

    def must_wait(step: int, must_save: bool) -> bool:
        """Whether what comes after so many steps needs this step's end, or may change the weights."""
        may_go_back = config.training.on_bad_step is OnBadStep.rollback
        return step == num_steps or evaluation.is_due(step) or saver.is_due(step, must_save) or may_go_back

    try:
        for step in range(result.num_steps, num_steps):
            # Evaluations and checkpoints are no part of a step: the line of the step before is written first, so that
            # lines are in order, and the clock of the steps stands still meanwhile.
            if evaluation.is_due(step):
                recorder.deferred.write()
                result.add_evaluation(step, evaluation.run(model, step))
                recorder.pause()

            recorder.begin_step()
            learning_rate = learning_rate_at(step, num_steps, config.training.learning_rate, config.optim)
            runner.set_learning_rate(learning_rate)
            passes = ahead or run_passes(step)
            is_first_update = not result.losses  # of this start
            wait = runner.update(passes, bad_steps.limit(), is_first_update)
            # The ranks agree whether to save. They do so before they wait for their GPUs: hosts make this sum, and they
            # notice when a rank never arrives, and say which. A GPU that waits for another can't say for which.
            must_save = processes.sum([saver.wants_checkpoint()])[0] > 0
            # The next step's passes use the weights as the device leaves them, whatever the host will read.
            can_run_ahead = runner.may_run_ahead and not must_wait(step + 1, must_save)
            ahead = run_passes(step + 1) if can_run_ahead else None
            recorder.deferred.write()
            figures = wait()  # for these only; the GPU may still be running what was queued after them
            is_good = bad_steps.check(step, figures.loss, figures.grad_norm, passes.batch.indices, passes.micro_losses)
            result.add_step(figures.loss, is_good)
            recorder.end_step(passes.batch, figures, is_good, learning_rate, passes.num_flops)

            is_last = step + 1 == num_steps  # the adapter is written after the last step, which needs no checkpoint
            if not is_last and saver.is_due(step + 1, must_save):
                recorder.deferred.write()
                saver.after_step(step + 1, must_save)
                recorder.pause()
    finally:
        recorder.deferred.write()
    result.add_evaluation(num_steps, evaluation.run(model, num_steps))
    result.add_measured(recorder)
    return result


def _seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed torch from seed, step and rank, so that a resumed run draws the same dropout masks."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))
