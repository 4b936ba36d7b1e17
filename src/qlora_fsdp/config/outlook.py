"""What a run's settings and own figures say of its chances: too few steps, an unlikely rate, a loss that did not fall.

A run that learned nothing ends as any other. So this is said where it is seen: at the start, above the last lines of
the log, in summary.json, in the report and on the model card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import assert_never

from qlora_fsdp.common.text import plural
from qlora_fsdp.config.schema import Config, DataFormat, LoraConfig, Optimizer, TaskName, Weights

FEW_STEPS = 50  # with fewer steps an adapter learns little (docs/choosing.md)
MAX_EPOCHS = 3  # of a run whose steps are few; more of them teach it the rows by heart
LEAST_BATCH = 4  # sequences that a smaller global batch still has, where that is enough
USUAL_RATES = (1e-5, 2e-3)  # peak learning rates of LoRA with Adam's step and lora_alpha=32 (docs/choosing.md)
USUAL_ALPHA = 32
LEAST_FALL = 0.01  # of the training loss, whose first and last steps have other rows
LEAST_EVAL_FALL = 0.001  # of the evaluation loss, which is of the same rows
EXPLODED = 1.2  # times the first step's loss: more than other rows make of it
LARGE_NORM = 10  # times the norms that the run began with


@dataclass(frozen=True)
class Ends:
    """The figures of the first and of the last steps of a run (`run_state.num_averaged`).

    Attributes:
        first_loss: the training loss of the first step, which the run has not changed yet.
        losses: their mean training losses.
        norms: their median gradient norms, before clipping.
        eval_losses: (step, loss) of each evaluation.
    """

    first_loss: float
    losses: tuple[float, float]
    norms: tuple[float, float]
    eval_losses: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Outlook:
    """What decides whether a run can learn.

    Attributes:
        may_learn: whether there is something to learn: data and weights are not random, as in a test of speed.
        learning_rate: its peak.
        usual_rates: the lowest and the highest that are usual.
        adapter: the settings that these depend on, as they are typed.
        max_steps: steps that somebody has asked for; None: they follow from the epochs.
        num_epochs: passes over the data.
        num_groups: groups of ranks that share a step; a global batch is a multiple of them.
        packs_rows: whether several rows may share a sequence.
        has_rewards: whether it learns from rewards for answers of its own, whose loss says nothing of that.
    """

    may_learn: bool
    learning_rate: float
    usual_rates: tuple[float, float]
    adapter: str
    max_steps: int | None
    num_epochs: float
    num_groups: int
    packs_rows: bool
    has_rewards: bool

    @classmethod
    def of(cls, config: Config, num_ranks: int) -> Outlook:
        """The outlook of a run on a number of ranks."""
        is_random = config.data.format is DataFormat.random or config.model.weights is Weights.random
        lora = config.lora
        return cls(
            may_learn=not is_random and not config.task.writes_answers,
            learning_rate=config.training.learning_rate,
            usual_rates=usual_rates(config.optim.name, lora),
            adapter=f"optim={config.optim.name.name} lora.r={lora.r} lora.lora_alpha={lora.lora_alpha:g}",
            max_steps=config.training.max_steps,
            num_epochs=config.training.num_epochs,
            num_groups=config.distributed.num_groups(num_ranks),
            packs_rows=not config.is_padded,
            has_rewards=config.task.name is TaskName.grpo,
        )

    def few_steps(self, num_steps: int, num_sequences: int | None) -> str | None:
        """Why a run has too few steps to learn much, and what to set; None if it has enough.

        Args:
            num_steps: optimizer steps of the whole run.
            num_sequences: sequences of the data; None if that is not known.
        """
        if num_steps >= FEW_STEPS or not self.may_learn:
            return None
        verb = "is" if num_steps == 1 else "are"
        text = f"{plural(num_steps, 'step')} {verb} few: below {FEW_STEPS} an adapter learns little."
        if self.max_steps is not None or num_sequences is None:
            return f"{text} Set training.max_steps={FEW_STEPS} or more."
        batch, epochs = self._enough(num_sequences)
        advice = f"Set training.global_batch_size={batch} training.num_epochs={epochs}"
        if self.packs_rows:
            advice += ", or a smaller training.max_length, which packs fewer rows into a sequence"
        return f"{text} {advice}."

    def _enough(self, num_sequences: int) -> tuple[int, int]:
        """A global batch and epochs that make FEW_STEPS steps: as few epochs as leave the batch LEAST_BATCH."""
        least = max(1, math.ceil(self.num_epochs))
        for epochs in range(least, max(least, MAX_EPOCHS) + 1):
            batch = epochs * num_sequences // FEW_STEPS // self.num_groups * self.num_groups
            if batch >= LEAST_BATCH:
                return batch, epochs
        batch = max(self.num_groups, batch)
        return batch, max(epochs, math.ceil(FEW_STEPS * batch / num_sequences))

    def unusual_rate(self) -> str | None:
        """What is unusual about the learning rate, with the range that is usual; None if it lies in that."""
        low, high = self.usual_rates
        rate = self.learning_rate
        if low <= rate <= high or not self.may_learn:
            return None
        side = "above" if rate > high else "below"
        return (
            f"training.learning_rate={rate:g} is {side} what is usual with {self.adapter}: {low:.0e} to {high:.0e}, "
            "2e-4 by default."
        )

    def judge(self, num_steps: int, num_sequences: int | None, ends: Ends | None) -> str | None:
        """What a finished run's figures say against it: the gravest, with what to set; None if they say nothing.

        Args:
            num_steps: optimizer steps of the whole run.
            num_sequences: sequences of the data; None if that is not known.
            ends: the figures of its first and last steps; None if the gradient of no step was used.
        """
        if self.has_rewards and ends is not None and max(ends.norms) == 0:
            return (
                "The gradients of the first and of the last steps are 0: nothing is learned where all answers to a "
                "prompt have one reward. Look at generations.jsonl, at reward.functions, and at "
                "rollout.num_generations, of which more differ more often."
            )
        if not self.may_learn:
            return None
        if ends is None:
            return "The gradient of no step was used: the adapter is as it was at the start."
        low, high = self.usual_rates
        rate = f"training.learning_rate, {self.learning_rate:g} now; usual are {low:.0e} to {high:.0e}"
        before, after = ends.losses
        calm, wild = ends.norms
        if num_steps > 1 and (after > before * (1 + LEAST_FALL) or after > ends.first_loss * EXPLODED):
            begin = min(before, ends.first_loss)
            return f"The training loss rose from {begin:.4f} to {after:.4f}. Lower {rate}."
        if wild > LARGE_NORM * max(calm, 1.0):
            return f"The gradient's norm grew from {calm:.4g} to {wild:.4g}: the steps are too large. Lower {rate}."
        likely = self.unusual_rate() or self.few_steps(num_steps, num_sequences)
        if likely is not None:
            return likely
        if len(ends.eval_losses) > 1 and ends.eval_losses[0][0] == 0:
            before, after = ends.eval_losses[0][1], ends.eval_losses[-1][1]
            if after <= before * (1 - LEAST_EVAL_FALL):
                return None
            return (
                f"The evaluation loss does not end below where it began ({before:.4f}, {after:.4f}): the adapter is "
                f"no better on held-out rows. Look at the rows with preview, and at {rate}."
            )
        if after > before * (1 - LEAST_FALL):
            return (
                f"The training loss ends where it began ({before:.4f}, {after:.4f}): the adapter has learned little. "
                f"Look at the rows with preview, and at {rate}."
            )
        return None


def usual_rates(optimizer: Optimizer, lora: LoraConfig) -> tuple[float, float]:
    """The usual peak learning rates of an optimizer and an adapter.

    An adapter's output is multiplied by alpha / r, with which the best learning rate does not depend on the rank;
    rsLoRA's alpha / sqrt(r) is that of an alpha that is sqrt(r) times as large (docs/choosing.md).
    """
    alpha = lora.lora_alpha * (math.sqrt(lora.r) if lora.use_rslora else 1.0)
    match optimizer:
        case Optimizer.adamw | Optimizer.adamw_8bit | Optimizer.adafactor:
            factor = 1.0
        case Optimizer.paged_adamw_32bit | Optimizer.paged_adamw_8bit:
            factor = 1.0
        case Optimizer.lion_32bit | Optimizer.lion_8bit:
            factor = 0.2
        case _:
            assert_never(optimizer)
    low, high = (rate * factor * USUAL_ALPHA / alpha for rate in USUAL_RATES)
    return low, high
