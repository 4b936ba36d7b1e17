"""A causal language model that learns from rewards for answers that it has written itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import peft
import torch
from torch import Tensor

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import GrpoConfig, RolloutConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.model.tasks.policy_loss import (
    MISMATCH,
    NUM_BINS,
    Answers,
    mismatch_of_share,
    policy_figures,
    policy_loss,
)
from qlora_fsdp.model.tasks.referenced import ReferencedLM

WantedOfPolicy = Literal["loss", "log_probs", "reference", "hidden"]


class PolicyLM(ReferencedLM):
    """A PEFT-wrapped causal language model with the loss of its own answers.

    Log-probabilities are those of logits divided by `rollout.temperature`, as the answers were drawn by.

    Args:
        model: the wrapped model, on meta or not.
        settings: the loss and its numbers.
        rollout: how answers are written.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.

    Attributes:
        learns: whether some answer of the step that is computed is better than others to its prompt. If not, gradients
            of zeros are as they should be.
        has_learned: whether an earlier step did.

    Raises:
        ConfigError: the temperature is not 1, and the model caps its logits or makes them in a way of its own.
    """

    def __init__(
        self,
        model: peft.PeftModel,
        settings: GrpoConfig,
        rollout: RolloutConfig,
        loss_kernel: LossKernel,
        transform: LogitTransform | None,
    ) -> None:
        super().__init__(model, loss_kernel, _at_temperature(transform, rollout.temperature))
        self.settings = settings
        self.learns = True
        self.has_learned = False
        bins = [f"{MISMATCH}/bin_{number}" for number in range(NUM_BINS)]
        self.figure_names = (*policy_figures(settings), *bins)

    def forward(self, batch: Batch, wants: WantedOfPolicy = "loss") -> Tensor:
        """Sum of the losses of the batch's answers, each token by its weight: float32 scalar.

        Args:
            batch: answers after their prompts, and for the loss what is known of them (`rewarded`).
            wants: what to return: the loss; float32 [B, L], the log-probabilities of tokens under the model as it is,
                or under the reference, without gradient; or what the head would get of the tokens at
                `label_positions`, [num_labels, D]. FSDP gathers only in calls of the whole model, so all go through
                `forward`.
        """
        match wants:
            case "log_probs":
                return self._log_probs(batch)
            case "reference":
                with self.as_reference():
                    return self._log_probs(batch)
            case "hidden":
                assert batch.label_positions is not None
                return self.hidden_states(batch)[batch.label_positions]
            case "loss":
                return self._loss(batch)

    def _log_probs(self, batch: Batch) -> Tensor:
        losses, _ = self.losses(batch, "none")
        return -losses.view(batch.targets.shape)

    def _loss(self, batch: Batch) -> Tensor:
        found, _ = self.losses(batch, "with_entropy")
        losses, entropies = found.flatten(1)
        loss, sums = policy_loss(Answers(-losses, entropies, batch), self.settings)
        self.add_sums(sums)
        return loss

    @torch.no_grad()
    def measure(self, batch: Batch, wants: WantedOfPolicy) -> Tensor:
        """Log-probabilities [B, L] of a batch on the device, before the loss of its answers is known.

        Both models are without dropout.
        """
        was_training = self.training
        self.eval()
        if wants == "reference" and self.frozen is not None:
            with self.frozen.in_place():
                found: Tensor = self(batch, "reference")
        else:
            found = self(batch, wants)
        self.train(was_training)
        return found.masked_fill(batch.targets == IGNORE_INDEX, 0.0)

    def may_get_zero_gradient(self, name: str) -> bool:
        """All may where the answers to each prompt are equally good; and LoRA's A until B is not zero any more."""
        is_at_start = ".lora_A." in name and not self.has_learned
        return not self.learns or is_at_start or super().may_get_zero_gradient(name)

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """As in `TaskModel`; of the bins of the mismatch it is the share of tokens below which it tells."""
        figures = super().name_figures(sums)
        shares = [figures.pop(name, 0.0) for name in self.figure_names[-NUM_BINS:]]
        if any(shares):
            figures[f"{MISMATCH}/p99"] = mismatch_of_share(shares)
        return figures


def _at_temperature(transform: LogitTransform | None, temperature: float) -> LogitTransform | None:
    """What makes the logits, divided by a temperature."""
    if temperature == 1.0:
        return transform
    if transform is None or transform.cap is not None:
        how = "caps its logits" if transform is not None else "makes its logits in a way of its own"
        reason = f"can't be used: the model {how}, which is not divided by anything here."
        raise ConfigError([Problem(f"rollout.temperature={temperature:g}", reason, "Set rollout.temperature=1.")])
    return replace(transform, factor=transform.factor / temperature)
