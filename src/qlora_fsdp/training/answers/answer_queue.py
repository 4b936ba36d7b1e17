"""Queues the passes of steps on answers that the model writes first: in place of the loop's queue of data.

A step: the model writes answers to the next prompts; functions reward them; what is better than others of its group
gets a positive advantage, what is worse a negative one; and the passes of all answers are queued. With
grpo.num_iterations the next steps have the same answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.errors import RewardError
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.reward_names import model_name, short_name
from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss, RewardConfig
from qlora_fsdp.data.batch import Batch, Rewarded
from qlora_fsdp.data.questions import Question, question_of
from qlora_fsdp.data.sequences import Indices, Sequences, SequenceSettings
from qlora_fsdp.model.tasks.policy_lm import PolicyLM, WantedOfPolicy
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.answers.advantages import (
    advantages_of,
    groups_without_spread,
    has_no_spread,
    mean_of,
    spread_of,
    weighted_rewards,
)
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep, token_weights
from qlora_fsdp.training.answers.reward_models import RewardModels
from qlora_fsdp.training.answers.rollouts import HELD_OUT, Completion, Rollouts, describe_shares
from qlora_fsdp.training.batches import GlobalBatch, GlobalBatches
from qlora_fsdp.training.capture.passes import place
from qlora_fsdp.training.rewards.functions import AnsweredQuestion, RewardFunctions
from qlora_fsdp.training.step import StepPasses, StepRunner
from qlora_fsdp.training.step_recorder import StepRecorder

NUM_SHOWN = 16  # answers of a step that are recorded
NUM_ALIKE = 10  # steps in a row without any spread of rewards, after which it is said what to do
log = logging.getLogger("qlora_fsdp")


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
        seconds: that writing took.
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


@dataclass(frozen=True)
class _Step:
    """The answers of a step, ready to be learned from.

    Attributes:
        batch: what the loop knows of the step.
        batches: this rank's micro-batches.
    """

    batch: GlobalBatch
    batches: list[Batch]


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
        figures = {
            "reward": mean_of(rewards),
            "reward_std": spread_of(rewards),
            "frac_reward_zero_std": groups_without_spread(rewards, answered.num_generations),
        }
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
                    "rewards": f"{totals[number]:g} ({told})",
                    **more,
                }
            )
        return found

    def close(self) -> None:
        """End the functions' processes."""
        if self.functions is not None:
            self.functions.close()


class AnswerQueue:
    """Has the passes of every step queued, once its answers are written.

    Args:
        runner: queues them; its model is a `PolicyLM`.
        batches: which prompts each step has.
        rewarded: writes and rewards.
        settings: the loss.
        layout: how answers become sequences.
        deterministic: whether the run repeats to the bit.
        recorder: has the line of the step before, which is written while this one computes.
        journal: gets some of the answers.
    """

    def __init__(
        self,
        runner: StepRunner,
        batches: GlobalBatches,
        rewarded: RewardedAnswers,
        settings: GrpoConfig,
        layout: SequenceSettings,
        deterministic: bool,
        recorder: StepRecorder,
        journal: Journal,
    ) -> None:
        assert isinstance(runner.model, PolicyLM)
        assert isinstance(batches.data, Sequences)
        self.model = runner.model
        self.runner = runner
        self.batches = batches
        self.data = batches.data
        self.rewarded = rewarded
        self.rollout = rewarded.rollouts.settings
        self.settings = settings
        self.layout = layout
        self.deterministic = deterministic
        self.recorder = recorder
        self.journal = journal
        self.processes = runner.processes
        self.num_alike = 0
        self._step: _Step | None = None
        num_answers = batches.split.global_batch_size * self.rollout.num_generations
        log.info(f"Answers: {describe_shares(num_answers, rewarded.rollouts.num_shares, self.rollout)}")

    def of_step(self, step: int) -> StepPasses:
        """The passes of a step, which are queued now.

        Raises:
            RewardError: a function has failed; the same on every rank.
        """
        self.recorder.write()
        number, iteration = divmod(step, self.settings.num_iterations)
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
        num_generations = self.rollout.num_generations
        self.runner.peaks.enter("evaluation")
        answered, indices, num_replaced = self._answer(prompts.indices, step)
        completions = answered.completions
        figures = self.rewarded.figures(answered)
        if self.rollout.dynamic_sampling:
            figures["num_replaced_prompts"] = num_replaced
        self.journal.generations(step, self.rewarded.shown(answered))

        is_cut = np.array([self.rewarded.rollouts.is_cut(completion) for completion in completions])
        counts = ~is_cut if self.settings.mask_truncated_completions else np.ones(len(is_cut), dtype=bool)
        rows = AnsweredRows([question.tokens for question in answered.asked], completions, counts)
        laid = AnsweredStep.of(rows, self.layout, self.batches.split, self.batches.rank)
        weights = token_weights(rows, self.settings, self.rollout.max_completion_length)
        rewards = weighted_rewards(answered.rewarding.by_function, self.rewarded.settings.weights)

        unrewarded = list(laid.batches(np.zeros(len(rewards)), weights))
        old = self._measure(unrewarded, "log_probs") if self.settings.needs_old_log_probs else None
        reference = self._measure(unrewarded, "reference") if self.settings.beta > 0 else None
        if self.settings.loss_type is PolicyLoss.rloo and old is not None and reference is not None:
            apart = laid.row_sums([first - second for first, second in zip(old, reference, strict=True)])
            found: dict[int, float] = {}
            for part in self.processes.gather(apart, dict[int, float]):
                found |= part
            divergences = np.array([found[row] for row in range(len(rewards))]) * counts
            rewards = rewards - self.settings.beta * divergences
        advantages = advantages_of(rewards, num_generations, self.settings)
        self.model.has_learned = self.model.has_learned or (self.model.learns and number > 0)
        self.model.learns = bool((advantages * counts).any())
        self._tell_alike(figures["frac_reward_zero_std"])

        batches = list(laid.batches(advantages, weights))
        for micro, batch in enumerate(batches):
            assert batch.rewarded is not None
            known = Rewarded(
                batch.rewarded.advantages,
                batch.rewarded.weights,
                batch.rewarded.sampled,
                None if old is None else old[micro],
                None if reference is None else reference[micro],
            )
            batches[micro] = self._pinned(replace(batch, rewarded=known))
        num_written = int(sum(len(completion.tokens) for completion in completions))
        figures |= {
            "rollout_seconds": answered.seconds,
            "rollout_tokens_per_second": num_written / answered.seconds,
            "reward_seconds": answered.rewarding.seconds,
        }
        whole = GlobalBatch(
            step=step,
            epoch=prompts.epoch,
            indices=indices,
            num_tokens=int(rows.lengths.sum()),
            num_targets=len(rows.prompts),
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
        answered = self.rewarded.answer(self._questions(indices), num_generations, step)
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

    def _measure(self, batches: Sequence[Batch], wants: WantedOfPolicy) -> list[torch.Tensor]:
        """Log-probabilities of each micro-batch before the step, float32 [B, L] on the CPU. Collective."""
        found = []
        for batch in batches:
            placed = place(batch, self.processes.device, self.deterministic)
            found.append(self.model.measure(placed, wants).cpu())
        free_gathered(self.model)
        return found

    def _pinned(self, batch: Batch) -> Batch:
        return batch.pin_memory() if self.processes.device.type == "cuda" else batch

    def _tell_alike(self, part: float) -> None:
        """Say what to do where the answers to every prompt have had one reward for many steps."""
        self.num_alike = self.num_alike + 1 if part == 1.0 else 0
        if self.num_alike == NUM_ALIKE:
            log.warning(
                f"For {plural(NUM_ALIKE, 'step')} all answers to a prompt have had the same reward, so that nothing is "
                "learned. Look at generations.jsonl: give prompts that the model answers rightly at times "
                "(rollout.dynamic_sampling=3 looks for some among all), rewards for "
                "a part of what is wanted, a higher rollout.temperature, or more rollout.num_generations."
            )
