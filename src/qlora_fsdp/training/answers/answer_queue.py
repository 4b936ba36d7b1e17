"""Queues the passes of steps on answers that the model writes first: in place of the loop's queue of data.

A step: the model writes answers to the next prompts; functions reward them, where there are some; a lesson says what is
learned from them, from rewards (from_rewards.py) or from a teacher (from_teacher.py); and the passes of all answers are
queued. A lesson may have several steps on the same answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.questions import Question, question_of
from qlora_fsdp.data.sequences import Indices, Sequences, SequenceSettings
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep
from qlora_fsdp.training.answers.rewarded import Answered, RewardedAnswers
from qlora_fsdp.training.answers.rollouts import Completion, describe_shares
from qlora_fsdp.training.batches import GlobalBatch, GlobalBatches
from qlora_fsdp.training.step import StepPasses, StepRunner
from qlora_fsdp.training.step_recorder import StepRecorder

log = logging.getLogger("qlora_fsdp")


class Lesson(Protocol):
    """What is learned from the answers of a step. All ranks call it together.

    Attributes:
        num_iterations: steps on the same answers.
    """

    num_iterations: int

    def given(self, questions: Sequence[Question], step: int) -> list[Completion] | None:
        """Answers from the data, one to each prompt, in place of those that the model would write; None: it writes."""

    def rows(self, answered: Answered) -> AnsweredRows:
        """The answers as rows, with those that count."""

    def batches(self, answered: Answered, laid: AnsweredStep, step: int) -> list[Batch]:
        """This rank's micro-batches with all that the loss asks for, on the CPU."""

    def num_targets(self, rows: AnsweredRows) -> int:
        """What the sum of the losses of the rows is divided by."""


@dataclass(frozen=True)
class _Step:
    """The answers of a step, ready to be learned from.

    Attributes:
        batch: what the loop knows of the step.
        batches: this rank's micro-batches.
    """

    batch: GlobalBatch
    batches: list[Batch]


class AnswerQueue:
    """Has the passes of every step queued, once its answers are written.

    Args:
        runner: queues them.
        batches: which prompts each step has.
        rewarded: writes and rewards.
        lesson: what is learned.
        layout: how answers become sequences.
        recorder: has the line of the step before, which is written while this one computes.
        journal: gets some of the answers.
    """

    def __init__(
        self,
        runner: StepRunner,
        batches: GlobalBatches,
        rewarded: RewardedAnswers,
        lesson: Lesson,
        layout: SequenceSettings,
        recorder: StepRecorder,
        journal: Journal,
    ) -> None:
        assert isinstance(batches.data, Sequences)
        self.runner = runner
        self.batches = batches
        self.data = batches.data
        self.rewarded = rewarded
        self.rollout = rewarded.rollouts.settings
        self.lesson = lesson
        self.layout = layout
        self.recorder = recorder
        self.journal = journal
        self.processes = runner.processes
        self._step: _Step | None = None
        num_answers = batches.split.global_batch_size * self.rollout.num_generations
        log.info(f"Answers: {describe_shares(num_answers, rewarded.rollouts.num_shares, self.rollout)}")

    def of_step(self, step: int) -> StepPasses:
        """The passes of a step, which are queued now.

        Raises:
            RewardError: a function has failed; the same on every rank.
        """
        self.recorder.write()
        number, iteration = divmod(step, self.lesson.num_iterations)
        if self._step is None or iteration == 0:
            if iteration > 0:
                log.info("Answers: this step's were written before the run was stopped, and are written anew")
            self._step = self._prepare(number, step)
        batch = self._step.batch
        if step != batch.step:  # figures of the answers are those of the step that they were written in
            batch = replace(batch, step=step, figures={})
        self.batches.seed_dropout(step)
        return self.runner.run_passes(iter(self._step.batches), batch, lambda: None)

    def queue_early(self, step: int) -> None:
        """Nothing: the next answers are written by the weights that this step makes."""

    def _prepare(self, number: int, step: int) -> _Step:
        """Write the answers of a step, reward them, and lay them out."""
        prompts = self.batches.of_step(number)
        self.runner.peaks.enter("answers")
        answered, indices, num_replaced = self._answer(prompts.indices, step)
        figures = self.rewarded.figures(answered) | answered.timing
        if self.rollout.dynamic_sampling:
            figures["num_replaced_prompts"] = num_replaced
        self.journal.generations(step, self.rewarded.shown(answered))
        rows = self.lesson.rows(answered)
        laid = AnsweredStep.of(rows, self.layout, self.batches.split, self.batches.rank)
        batches = self.lesson.batches(answered, laid, step)
        if self.processes.device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        whole = GlobalBatch(
            step=step,
            epoch=prompts.epoch,
            indices=indices,
            num_tokens=int(rows.lengths.sum()),
            num_targets=self.lesson.num_targets(rows),
            num_micro_batches=len(batches),
            figures=figures,
        )
        return _Step(whole, batches)

    def _answer(self, indices: Indices, step: int) -> tuple[Answered, Indices, int]:
        """The answers of a step with their rewards; the prompts; and how many were replaced by others on the way.

        With rollout.dynamic_sampling, prompts whose answers all have one reward are replaced by prompts that are not
        in the step, in an order that follows from seed and step, until there are none or all tries are used.
        """
        num_generations = self.rollout.num_generations
        questions = self._questions(indices)
        given = self.lesson.given(questions, step)
        if given is not None:
            return self.rewarded.reward_given(questions, given, step), indices, 0
        answered = self.rewarded.answer(questions, num_generations, step)
        order = np.random.default_rng([self.batches.seed, step]).permutation(len(self.data))
        others = order[~np.isin(order, indices)]
        indices = indices.copy()
        extra = self.rewarded.extra
        num_replaced = 0
        for attempt in range(1, self.rollout.dynamic_sampling + 1):
            places = self.rewarded.without_spread(answered)[: len(others)]
            if not len(places):
                break
            chosen, others = others[: len(places)], others[len(places) :]
            first = attempt * len(indices)
            again = self.rewarded.answer(self._questions(chosen), num_generations, step, first)
            answered = answered.with_replaced(places, again)
            indices[places] = chosen
            num_replaced += len(places)
            extra = {}  # what functions have logged of answers is not told where some were replaced
        self.rewarded.extra = extra
        return answered, indices, num_replaced

    def _questions(self, indices: Indices) -> list[Question]:
        return [question_of(self.data, int(index)) for index in indices]
