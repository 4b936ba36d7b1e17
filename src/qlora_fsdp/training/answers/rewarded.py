"""Answers with what they are worth: the model writes them, functions and reward models reward them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import RewardError
from qlora_fsdp.config.reward_names import model_name, short_name
from qlora_fsdp.config.schema import RewardConfig
from qlora_fsdp.data.questions import Question
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.answers.advantages import (
    groups_without_spread,
    has_no_spread,
    mean_of,
    spread_of,
    weighted_rewards,
)
from qlora_fsdp.training.answers.reward_models import RewardModels
from qlora_fsdp.training.answers.rollouts import HELD_OUT, Completion, Rollouts
from qlora_fsdp.training.rewards.functions import AnsweredQuestion, RewardFunctions

NUM_SHOWN = 16  # answers of a step that are recorded


@dataclass(frozen=True)
class Rewarding:
    """What functions gave the answers of a step, as rank 0 tells it.

    Attributes:
        by_function: [num_answers, num_functions], and then a column for each reward model; NaN: nothing.
        metrics: what functions have logged.
        seconds: how long they took.
        error: what failed; None: nothing.
    """

    by_function: NDArray[np.float64]
    metrics: dict[str, float]
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Answered:
    """Answers to prompts, and what they are worth.

    Attributes:
        questions: the prompts.
        num_generations: answers to each.
        completions: the answers, those to one prompt side by side.
        rewarding: what functions gave.
        seconds: that writing took; 0 of answers that the data has.
    """

    questions: Sequence[Question]
    num_generations: int
    completions: list[Completion]
    rewarding: Rewarding
    seconds: float

    @property
    def asked(self) -> list[Question]:
        """The prompt of each answer."""
        return [question for question in self.questions for _ in range(self.num_generations)]

    @property
    def timing(self) -> dict[str, float]:
        """How long writing and rewarding took."""
        found = {"reward_seconds": self.rewarding.seconds}
        if self.seconds:
            found["rollout_seconds"] = self.seconds
            found["rollout_tokens_per_second"] = sum(len(each.tokens) for each in self.completions) / self.seconds
        return found

    def with_replaced(self, places: NDArray[np.int64], others: Answered) -> Answered:
        """The same with other prompts and their answers in the places of some."""
        questions = list(self.questions)
        completions = list(self.completions)
        by_function = self.rewarding.by_function.copy()
        size = self.num_generations
        for number, at in enumerate(places.tolist()):
            own = slice(at * size, (at + 1) * size)
            theirs = slice(number * size, (number + 1) * size)
            questions[at] = others.questions[number]
            completions[own] = others.completions[theirs]
            by_function[own] = others.rewarding.by_function[theirs]
        seconds = self.rewarding.seconds + others.rewarding.seconds
        rewarding = replace(self.rewarding, by_function=by_function, seconds=seconds)
        return replace(
            self,
            questions=questions,
            completions=completions,
            rewarding=rewarding,
            seconds=self.seconds + others.seconds,
        )


class RewardedAnswers:
    """Writes answers and has them rewarded. All ranks call it together.

    Args:
        rollouts: writes.
        reward: the functions, of which rank 0 starts the processes.
        num_steps: of the run, as functions are told.
        processes: all ranks take part.
        models: reward models; None: there are none.

    Raises:
        RewardError: a function can't be used; the same on every rank.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        reward: RewardConfig,
        num_steps: int,
        processes: Processes,
        models: RewardModels | None = None,
    ) -> None:
        self.rollouts = rollouts
        self.settings = reward
        self.num_steps = num_steps
        self.processes = processes
        self.models = models
        self.names = [*map(short_name, reward.functions), *map(model_name, reward.models)]
        self.functions: RewardFunctions | None = None
        self.extra: dict[str, list[str]] = {}  # what functions have logged of each answer, on rank 0
        error = None
        if processes.is_main:
            try:
                self.functions = RewardFunctions(reward, rollouts.settings.max_completion_length)
            except RewardError as found:
                error = str(found)
        error = processes.first_error(error)
        if error is not None:
            raise RewardError(error)

    def answer(self, questions: Sequence[Question], num_generations: int, step: int, first_prompt: int = 0) -> Answered:
        """Answers to each prompt with their rewards, the same on every rank. Arguments are those of `Rollouts.write`.

        Raises:
            RewardError: a function has failed; the same on every rank.
        """
        started = time.perf_counter()
        completions = self.rollouts.write(questions, num_generations, step, first_prompt)
        seconds = time.perf_counter() - started
        return self._rewarded(questions, num_generations, completions, step, seconds)

    def reward_given(self, questions: Sequence[Question], completions: list[Completion], step: int) -> Answered:
        """Answers that the data has, one to each prompt, with their rewards, the same on every rank.

        Raises:
            RewardError: a function has failed; the same on every rank.
        """
        return self._rewarded(questions, 1, completions, step, 0.0)

    def _rewarded(
        self,
        questions: Sequence[Question],
        num_generations: int,
        completions: list[Completion],
        step: int,
        seconds: float,
    ) -> Answered:
        own = None
        if self.functions is not None:
            own = self._reward(questions, num_generations, completions, step)
        rewarding: Rewarding = self.processes.share(own, Rewarding, patiently=True)
        if rewarding.error is not None:
            raise RewardError(rewarding.error)
        if self.models is not None:
            began = time.perf_counter()
            asked = [question for question in questions for _ in range(num_generations)]
            by_model = self.models.score(asked, completions)
            both = np.concatenate([rewarding.by_function, by_model], 1)
            in_all = rewarding.seconds + time.perf_counter() - began
            rewarding = replace(rewarding, by_function=both, seconds=in_all)
        return Answered(questions, num_generations, completions, rewarding, seconds)

    def without_spread(self, answered: Answered) -> NDArray[np.int64]:
        """Numbers of the prompts whose answers all have one reward."""
        rewards = weighted_rewards(answered.rewarding.by_function, self.settings.weights)
        return np.flatnonzero(has_no_spread(rewards, answered.num_generations))

    def _reward(
        self, questions: Sequence[Question], num_generations: int, completions: Sequence[Completion], step: int
    ) -> Rewarding:
        """What the functions give, on rank 0."""
        assert self.functions is not None
        answers = []
        for number, written in enumerate(completions):
            text = self.rollouts.answer(written)
            answers.append(AnsweredQuestion(questions[number // num_generations], written.tokens, text))
        started = time.perf_counter()
        at = 0 if step == HELD_OUT else step
        try:
            found = self.functions.reward(answers, {"global_step": at, "max_steps": self.num_steps})
        except RewardError as error:
            return Rewarding(np.zeros((0, 0)), {}, 0.0, str(error))
        self.extra = found.extra
        return Rewarding(found.by_function, found.metrics, time.perf_counter() - started)

    def figures(self, answered: Answered) -> dict[str, float]:
        """Figures of answers and rewards, by TRL's names."""
        rewarding = answered.rewarding
        completions = answered.completions
        rewards = weighted_rewards(rewarding.by_function, self.settings.weights)
        lengths = np.array([len(completion.tokens) for completion in completions])
        is_cut = np.array([self.rollouts.is_cut(completion) for completion in completions])
        figures: dict[str, float] = {}
        if self.names:
            figures["reward"] = mean_of(rewards)
            figures["reward_std"] = spread_of(rewards)
        if self.names and answered.num_generations > 1:
            figures["frac_reward_zero_std"] = groups_without_spread(rewards, answered.num_generations)
        for number, name in enumerate(self.names):
            figures[f"rewards/{name}/mean"] = mean_of(rewarding.by_function[:, number])
            figures[f"rewards/{name}/std"] = spread_of(rewarding.by_function[:, number])
        figures |= {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(is_cut.mean()),
        }
        return rewarding.metrics | figures  # ours count where a function logs something by the same name

    def shown(self, answered: Answered) -> list[dict[str, Any]]:
        """The first answers of a step as they are recorded: prompt, completion, rewards."""
        rewarding = answered.rewarding
        found = []
        own_names = ("step", "prompt", "completion", "reference", "rewards")
        totals = weighted_rewards(rewarding.by_function, self.settings.weights).tolist()
        asked = answered.asked
        for number, completion in enumerate(answered.completions[:NUM_SHOWN]):
            question = asked[number]
            own = dict(zip(self.names, rewarding.by_function[number].tolist(), strict=True))
            told = ", ".join(f"{name} {value:g}" for name, value in own.items())
            logged = {name: values for name, values in self.extra.items() if name not in own_names}
            more = {name: values[number] for name, values in logged.items() if number < len(values)}
            found.append(
                {
                    "prompt": self.rollouts.text(question.tokens),
                    "completion": self.rollouts.answer(completion),
                    "reference": str(question.columns.get("answer", question.columns.get("solution", ""))),
                    "rewards": f"{totals[number]:g} ({told})" if own else "",
                    **more,
                }
            )
        return found

    def close(self) -> None:
        """End the functions' processes."""
        if self.functions is not None:
            self.functions.close()
