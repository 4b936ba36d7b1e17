"""Evaluations of a model that learns from rewards: what its answers to held-out prompts are worth."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from qlora_fsdp.data.questions import question_of
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.training.answers.answer_queue import RewardedAnswers
from qlora_fsdp.training.answers.rollouts import HELD_OUT
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.evaluate import EvaluationResult


@dataclass(frozen=True)
class RewardEvaluation:
    """One answer to each held-out prompt, drawn as in training and by the same random numbers each time.

    What stands for a loss is the mean reward with its sign changed, so that lower is better: `training.
    early_stopping_patience` stops where rewards grow no more.

    Attributes:
        data: the held-out prompts; None: there are none.
        every_steps: evaluate every so many steps; None: only before the first step and after the last.
        rewarded: writes and rewards.
        journal: gets the figures.
        saver: knows of signals, and stops the run where one arrives during an evaluation.
    """

    data: Sequences | None
    every_steps: int | None
    rewarded: RewardedAnswers
    journal: Journal
    saver: Saver

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
        questions = [question_of(self.data, index) for index in range(len(self.data))]
        answered = self.rewarded.answer(questions, 1, HELD_OUT)
        if self.saver.is_signalled():
            self.saver.stop(step)
        figures = self.rewarded.figures(answered)
        del figures["frac_reward_zero_std"]  # of groups of one
        kept = {name: value for name, value in figures.items() if np.isfinite(value)}
        loss = -kept.get("reward", 0.0)
        self.journal.evaluation(step, loss, kept, time.perf_counter() - started)
        return EvaluationResult(loss, kept)
