"""The second half of a run: make the parts of the training loop, run it, and write the adapter."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from qlora_fsdp.common.files import replacing
from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.config.world import AUTO
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.tokenizer import ContainedTokenizer
from qlora_fsdp.model.adapters.write_adapter import adapter_keys, save_adapter, write_adapter
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.model.tasks.policy_lm import PolicyLM
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_folder import writing
from qlora_fsdp.records.run_state import CHECKPOINTS, checkpoint_folders, step_of
from qlora_fsdp.records.run_summary import RunSummary
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.watch import Watch
from qlora_fsdp.training.answers.answer_queue import AnswerQueue, Lesson
from qlora_fsdp.training.answers.evaluate import AnswerEvaluation
from qlora_fsdp.training.answers.from_rewards import FromRewards
from qlora_fsdp.training.answers.from_teacher import FromTeacher, put_teacher_in
from qlora_fsdp.training.answers.reward_models import RewardModels
from qlora_fsdp.training.answers.rewarded import RewardedAnswers
from qlora_fsdp.training.answers.rollouts import Rollouts
from qlora_fsdp.training.bad_steps import NUM_NORMS, BadSteps
from qlora_fsdp.training.batches import GlobalBatches
from qlora_fsdp.training.capture.captured import make_passes
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, load_checkpoint
from qlora_fsdp.training.checkpoints.resume import begin_attempt, settings_of
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.checkpoints.thread import CheckpointThread
from qlora_fsdp.training.describe_adapter import describe_adapter
from qlora_fsdp.training.early_stop import EarlyStop
from qlora_fsdp.training.evaluate import Evaluation
from qlora_fsdp.training.generations import Generations
from qlora_fsdp.training.loop import PassQueue, RunEvaluation, StepQueue, TrainResult, train
from qlora_fsdp.training.optim import LocalOptimizer, make_optimizer, rate_ratios
from qlora_fsdp.training.prepare import Prepared
from qlora_fsdp.training.step import StepRunner
from qlora_fsdp.training.step_recorder import StepRecorder
from qlora_fsdp.training.teacher import open_scores

log = logging.getLogger("qlora_fsdp")


@dataclass(frozen=True)
class AdapterSettings:
    """What is saved with an adapter, so that its model can be built again and used.

    Attributes:
        text: the settings, of SETTINGS_FILE.
        form: the form of the rows that it was trained on; None if it is unknown.
    """

    text: str
    form: DataFormat | None


def train_adapter(
    prepared: Prepared,
    adapter_settings: AdapterSettings,
    processes: Processes,
    watch: Watch,
    folder: Path,
    checkpoint: Checkpoint | None,
    summary: RunSummary,
) -> TrainResult:
    """Train from the first step, or from where the checkpoint ends, and write the adapter. Collective.

    Args:
        prepared: with a model that is loaded.
        adapter_settings: what is saved with the adapter.
        processes: all ranks take part.
        watch: ends the run at a signal. During training it lets the run save first.
        folder: the run folder.
        checkpoint: what to resume from, or None.
        summary: gets the figures of the checkpoints, even if training ends with an error.
    """
    model = prepared.model
    data = prepared.data
    split = prepared.split
    peaks = prepared.peaks
    spec = prepared.spec
    trainable = [p for p in model.parameters() if p.requires_grad]
    ratios = rate_ratios(model, spec.steps.optim, spec.steps.learning_rate)
    optimizer = make_optimizer(trainable, spec.steps.optim, spec.steps.learning_rate, ratios)
    result = _resume(checkpoint, prepared, optimizer, processes, folder, summary)

    describe = partial(describe_adapter, prepared, result, folder, adapter_settings.form)
    settings = adapter_settings.text
    keys = adapter_keys(model.model)

    def write_adapter_to(target: Path, state: dict[str, Tensor]) -> None:
        write_adapter(model.model, state, keys, target, prepared.tokenizer, describe(is_final=False), settings)

    journal = Journal(folder, spec.tracking, split.num_steps, processes.is_main, result.num_steps)
    content = _checkpoint_content(prepared, processes, folder, result)
    thread = CheckpointThread(
        spec.saving, content, model.model, optimizer, write_adapter_to, processes, journal, result.criterion
    )
    saver = Saver(thread, watch)
    # Lines of metrics.jsonl that earlier starts wrote. Only rank 0 reads the file.
    used = processes.share(journal.used_steps() if processes.is_main else None, list[tuple[float, float]])
    result.add_earlier(used)
    bad_steps = _make_bad_steps(prepared, folder, [norm for _, norm in used[-NUM_NORMS:]], saver)
    passes = make_passes(prepared, trainable, processes)
    runner = StepRunner(model, passes, optimizer, spec.steps.optim.max_grad_norm, prepared.flops, peaks, processes)
    batches = GlobalBatches(data.train, split, spec.steps.seed, processes.rank)
    recorder = StepRecorder(journal, peaks, processes)
    early_stop = EarlyStop(spec.steps, folder, processes)

    figures = dict(summary.figures)  # for the trackers, which also get the result of training below
    closing = ExitStack()
    try:
        evaluation: RunEvaluation
        queue: StepQueue
        if spec.modules.task.writes_answers:
            queue, evaluation = _start_answers(prepared, runner, batches, recorder, journal, saver)
            closing.callback(queue.rewarded.close)
        else:
            trusted = prepared.assembled.spec.trust_remote_code
            generations = Generations(spec.generations, data.eval, prepared.tokenizer, processes, trusted)
            every = spec.steps.eval_every_steps
            evaluation = Evaluation(data.eval, every, split, passes, generations, processes, peaks, journal, saver)
            queue = PassQueue(runner, batches, recorder, first_step=result.num_steps)
        watch.be_patient(
            "the run saves and stops at the end of this step, or in an evaluation before its next batch; "
            "another signal, such as Ctrl-C, stops it at once, without saving"
        )
        with saver:
            steps = split.num_steps
            result = train(runner, queue, steps, evaluation, recorder, saver, bad_steps, spec.steps, early_stop, result)
        num_sequences = None if spec.data.settings.streaming else len(data.train)
        result.doubt = spec.outlook.judge(split.num_steps, num_sequences, result.ends)
        watch.be_patient("all steps are done, and the run finishes; another signal, such as Ctrl-C, stops it at once")
        save_adapter(model.model, folder / "adapter", prepared.tokenizer, describe(), settings, processes)
        if spec.saving.best_at_end:
            _take_best(result, folder, processes)
            result.doubt = spec.outlook.judge(split.num_steps, num_sequences, result.ends)
        figures |= {"status": "finished"} | result.describe()
    finally:
        closing.close()
        passes.close()
        summary.trained(thread.describe())
        journal.close(figures)
    return result


def _start_answers(
    prepared: Prepared,
    runner: StepRunner,
    batches: GlobalBatches,
    recorder: StepRecorder,
    journal: Journal,
    saver: Saver,
) -> tuple[AnswerQueue, AnswerEvaluation]:
    """What has the model's own answers written and rewarded, for steps and for evaluations. Collective.

    Raises:
        ConfigError: this model can't write answers here.
        AdapterError: the adapter that teaches, or one that rewards, can't be used here.
        RewardError: a function that rewards them can't be used.
    """
    spec = prepared.spec
    task = spec.modules.task
    processes = runner.processes
    trusted = prepared.assembled.spec.trust_remote_code
    rollouts = Rollouts(prepared.model, task.rollout, prepared.tokenizer, spec.steps.seed, processes, trusted)
    layout = SequenceSettings.of(spec.data, prepared.tokenizer)
    base = str(spec.recorded["model.path"])
    models = None
    if spec.reward.models:
        models = RewardModels(spec.reward.models, prepared.assembled, base, layout, prepared.split, processes)
    rewarded = RewardedAnswers(rollouts, spec.reward, prepared.split.num_steps, processes, models)
    model = prepared.model
    deterministic = spec.steps.deterministic
    lesson: Lesson
    teaching = None
    if isinstance(model, DistillLM):
        put_teacher_in(prepared.assembled, task.distill, base, processes)
        scores = open_scores(task, prepared.tokenizer)
        seed = spec.steps.seed
        teaching = FromTeacher(model, task.distill, layout, prepared.split, seed, processes, deterministic, scores)
        lesson = teaching
    else:
        assert isinstance(model, PolicyLM)
        lesson = FromRewards(model, rewarded, task.grpo, deterministic)
    queue = AnswerQueue(runner, batches, rewarded, lesson, layout, recorder, journal)
    every = spec.steps.eval_every_steps
    return queue, AnswerEvaluation(prepared.data.eval, every, rewarded, journal, saver, teaching)


def _resume(
    checkpoint: Checkpoint | None,
    prepared: Prepared,
    optimizer: LocalOptimizer,
    processes: Processes,
    folder: Path,
    summary: RunSummary,
) -> TrainResult:
    """Load the checkpoint, if there is one, into model and optimizer, and note in the folder that a start begins.

    Returns:
        What earlier starts have done up to the checkpoint.
    """
    criterion = prepared.spec.steps.criterion
    result = TrainResult(criterion=criterion)
    if checkpoint is not None:
        with summary.resuming():
            load_checkpoint(checkpoint, prepared.model.model, optimizer, processes)
        result = TrainResult(
            checkpoint.step,
            eval_losses=checkpoint.eval_losses,
            eval_metrics=checkpoint.eval_metrics,
            criterion=criterion,
        )
    if processes.is_main:
        with writing(folder):
            begin_attempt(checkpoint, folder)
    return result


def _take_best(result: TrainResult, folder: Path, processes: Processes) -> None:
    """Put the adapter of the best kept checkpoint in the last step's place. Collective.

    Nothing is done where the last step's is as good, or where it alone was evaluated.
    """
    criterion = result.criterion
    values = result.judged
    costs = {step: criterion.cost(value) for step, value in values.items()}
    last = costs.get(result.num_steps, math.inf)
    step = result.num_steps
    if processes.is_main:
        kept = {step_of(path): path for path in checkpoint_folders(folder / CHECKPOINTS)}
        better = [(cost, step) for step, cost in costs.items() if cost < last and step in kept]
        if better:
            _, step = min(better)
            with writing(folder), replacing(folder / "adapter") as temporary:
                shutil.copytree(kept[step] / "adapter", temporary)
            log.info(
                f"The adapter is that of step {step}: its evaluation {criterion.name} {values[step]:.4f} is "
                f"{criterion.better} than {values.get(result.num_steps, math.inf):.4f}."
            )
    step = processes.share(step, int)
    if step != result.num_steps:
        result.go_back_to(step)


def _make_bad_steps(prepared: Prepared, folder: Path, norms: Sequence[float], saver: Saver) -> BadSteps:
    """What judges the steps. `norms` are the gradient norms of earlier starts' steps."""
    train = prepared.data.train
    decode = ContainedTokenizer(prepared.tokenizer).decode
    return BadSteps(prepared.spec.steps, folder, train, prepared.split, decode, norms, saver, saver.processes)


def _checkpoint_content(prepared: Prepared, processes: Processes, folder: Path, result: TrainResult) -> Checkpoint:
    """The manifest fields that all checkpoints of this run share: its settings with what was chosen in place of auto.

    `eval_losses` and `eval_metrics` are the result's own lists, so they grow as the loop evaluates.
    """
    recorded = prepared.spec.recorded
    chosen = {key: value for key, value in prepared.run_plan.chosen.items() if recorded[key] == AUTO}
    return Checkpoint(
        folder / CHECKPOINTS,
        result.num_steps,
        processes.num_ranks,
        settings_of({**recorded, **chosen}, processes.num_ranks),
        prepared.data.train.describe(),
        prepared.base,
        result.eval_losses,
        result.eval_metrics,
    )
