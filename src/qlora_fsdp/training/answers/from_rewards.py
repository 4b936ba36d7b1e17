"""Learning from rewards: answers better than others of their group get a positive advantage, worse ones a negative."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from qlora_fsdp.common.text import plural
from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.data.questions import Question
from qlora_fsdp.model.tasks.policy_lm import PolicyLM, WantedOfPolicy
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.training.answers.advantages import advantages_of, groups_without_spread, weighted_rewards
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep, token_weights
from qlora_fsdp.training.answers.rewarded import Answered, RewardedAnswers
from qlora_fsdp.training.capture.passes import place

NUM_ALIKE = 10  # generations in a row without any spread of rewards, after which it is said what to do
log = logging.getLogger("qlora_fsdp")


class FromRewards:
    """What task=grpo learns from the answers of a step (`answer_queue.Lesson`). All ranks call it together.

    Args:
        model: sharded and loaded.
        rewarded: writes and rewards.
        settings: the loss.
        deterministic: whether the run repeats to the bit.
    """

    def __init__(self, model: PolicyLM, rewarded: RewardedAnswers, settings: GrpoConfig, deterministic: bool) -> None:
        self.model = model
        self.rewarded = rewarded
        self.processes = rewarded.processes
        self.settings = settings
        self.deterministic = deterministic
        self.num_iterations = settings.num_iterations
        self.num_alike = 0
        self.num_cut = 0

    def given(self, questions: Sequence[Question], step: int) -> None:
        """None: the model writes all answers."""

    def rows(self, answered: Answered) -> AnsweredRows:
        """The answers as rows; cut ones may not count."""
        is_cut = np.array([self.rewarded.rollouts.is_cut(completion) for completion in answered.completions])
        counts = ~is_cut if self.settings.mask_truncated_completions else np.ones(len(is_cut), dtype=bool)
        return AnsweredRows([question.tokens for question in answered.asked], answered.completions, counts)

    def num_targets(self, rows: AnsweredRows) -> int:
        """Losses are divided by the number of answers: see `token_weights`."""
        return len(rows.prompts)

    def batches(self, answered: Answered, laid: AnsweredStep, step: int) -> list[Batch]:
        """Micro-batches with advantages, and with log-probabilities of before where the loss asks for some."""
        rows = laid.rows
        num_generations = answered.num_generations
        weights = token_weights(rows, self.settings, self.rewarded.rollouts.settings.max_completion_length)
        rewards = weighted_rewards(answered.rewarding.by_function, self.rewarded.settings.weights)
        alike = groups_without_spread(rewards, num_generations)

        unrewarded = list(laid.batches(np.zeros(len(rewards)), weights))
        old = self._measure(unrewarded, "log_probs") if self.settings.needs_old_log_probs else None
        reference = self._measure(unrewarded, "reference") if self.settings.beta > 0 else None
        if self.settings.loss_type is PolicyLoss.rloo and old is not None and reference is not None:
            apart = laid.row_sums([first - second for first, second in zip(old, reference, strict=True)])
            found: dict[int, float] = {}
            for part in self.processes.gather(apart, dict[int, float]):
                found |= part
            divergences = np.array([found[row] for row in range(len(rewards))]) * rows.counts
            rewards = rewards - self.settings.beta * divergences
        advantages = advantages_of(rewards, num_generations, self.settings)
        self.model.has_learned = self.model.has_learned or (self.model.learns and step > 0)
        self.model.learns = bool((advantages * rows.counts).any())
        self._tell_alike(alike)
        self._tell_cut(rows)

        batches = list(laid.batches(advantages, weights))
        for micro, batch in enumerate(batches):
            assert batch.rewarded is not None
            known = replace(
                batch.rewarded,
                old=None if old is None else old[micro],
                reference=None if reference is None else reference[micro],
            )
            batches[micro] = replace(batch, rewarded=known)
        return batches

    def _measure(self, batches: Sequence[Batch], wants: WantedOfPolicy) -> list[torch.Tensor]:
        """Log-probabilities of each micro-batch before the step, float32 [B, L] on the CPU. Collective."""
        found = []
        for batch in batches:
            placed = place(batch, self.processes.device, self.deterministic)
            found.append(self.model.measure(placed, wants).cpu())
        free_gathered(self.model)
        return found

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

    def _tell_cut(self, rows: AnsweredRows) -> None:
        """Say what to do where no answer has counted for many steps, as all were cut off."""
        self.num_cut = 0 if rows.counts.any() else self.num_cut + 1
        if self.num_cut == NUM_ALIKE:
            log.warning(
                f"For {plural(NUM_ALIKE, 'step')} all answers have been cut off at rollout.max_completion_length="
                f"{self.rewarded.rollouts.settings.max_completion_length}, and grpo.mask_truncated_completions=true "
                "leaves such out, so that nothing is learned. Set rollout.max_completion_length higher, or "
                "grpo.mask_truncated_completions=false."
            )
