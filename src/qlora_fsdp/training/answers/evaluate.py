"""Evaluations by answers to held-out prompts: what they are worth, how many pass, how far they are from a teacher's."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from qlora_fsdp.data.questions import question_of
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.training.answers.advantages import pass_rates
from qlora_fsdp.training.answers.from_teacher import FromTeacher
from qlora_fsdp.training.answers.rewarded import RewardedAnswers
from qlora_fsdp.training.answers.rollouts import HELD_OUT
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.evaluate import EvaluationResult


def evaluate_answers(
    rewarded: RewardedAnswers, prompts: Sequences, teaching: FromTeacher | None = None
) -> dict[str, float]:
    """Has `rollout.num_generations_eval` answers to each prompt written and rewarded. Collective.

    Answers are drawn as in training, and by the same random numbers each time; where a teacher knows of those in the
    data alone, it is these.

    Returns:
        Figures by name, those that are numbers: as of training, and `pass@1` and `pass@k` by the first function. With a
        teacher also the divergence of a token, `loss`, which may be no number.

    Raises:
        RewardError: a function has failed; the same on every rank.
    """
    questions = [question_of(prompts, index) for index in range(len(prompts))]
    num_generations = rewarded.rollouts.settings.used_num_generations_eval
    given = None if teaching is None else teaching.given_to_evaluate(questions)
    if given is None:
        answered = rewarded.answer(questions, num_generations, HELD_OUT)
    else:
        num_generations = 1
        answered = rewarded.reward_given(questions, given, HELD_OUT)
    figures = rewarded.figures(answered)
    if rewarded.names:
        deciding = answered.rewarding.by_function[:, 0]
        figures |= pass_rates(deciding, num_generations, rewarded.settings.pass_threshold)
    figures.pop("loss", None)  # a reward function may name a figure of its own so
    if teaching is not None:
        figures |= teaching.evaluate(answered)
    return {name: value for name, value in figures.items() if name == "loss" or np.isfinite(value)}


@dataclass(frozen=True)
class AnswerEvaluation:
    """Answers to held-out prompts.

    The loss is the divergence from the teacher. Without one the mean reward with its sign changed stands for it, so
    that lower is better: `training.early_stopping_patience` stops where rewards grow no more.

    Attributes:
        data: the held-out prompts; None: there are none.
        every_steps: evaluate every so many steps; None: only before the first step and after the last.
        rewarded: writes and rewards.
        journal: gets the figures.
        teaching: compares answers with a teacher; None: there is none.
        saver: knows of signals, and stops the run where one arrives during an evaluation.
    """

    data: Sequences | None
    every_steps: int | None
    rewarded: RewardedAnswers
    journal: Journal
    saver: Saver
    teaching: FromTeacher | None = None

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` optimizer steps, if these are not all."""
        return step == 0 or (self.every_steps is not None and step % self.every_steps == 0)

    def run(self, model: TaskModel, step: int) -> EvaluationResult | None:
        """Evaluate after `step` optimizer steps, and record what was found; None without held-out prompts.

        Raises:
            RewardError: a function has failed.
            Interrupted: a rank got a signal to stop.
        """
        if self.data is None:
            return None
        started = time.perf_counter()
        figures = evaluate_answers(self.rewarded, self.data, self.teaching)
        if self.saver.is_signalled():
            self.saver.stop(step)
        loss = -figures.get("reward", math.nan) if self.teaching is None else figures.pop("loss")
        self.journal.evaluation(step, loss, figures, time.perf_counter() - started)
        return EvaluationResult(loss, figures)
