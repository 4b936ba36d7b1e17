"""A causal language model that learns from rewards for answers that it has written itself."""

from __future__ import annotations

from typing import Literal

import peft
import torch
from torch import Tensor

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import GrpoConfig, RolloutConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.model.tasks.answering_lm import AnsweringLM
from qlora_fsdp.model.tasks.policy_loss import Answers, policy_figures, policy_loss

WantedOfPolicy = Literal["loss", "log_probs", "reference", "hidden"]


class PolicyLM(AnsweringLM):
    """A PEFT-wrapped causal language model with the loss of rewarded answers.

    Args:
        model: the wrapped model, on meta or not.
        settings: the loss and its numbers.
        rollout: how answers are written.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.

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
        super().__init__(model, rollout, loss_kernel, transform, policy_figures(settings))
        self.settings = settings

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
                return self.head_inputs(batch)
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
        with self.without_dropout():
            if wants == "reference" and self.frozen is not None:
                with self.frozen.in_place():
                    found: Tensor = self(batch, "reference")
            else:
                found = self(batch, wants)
        return found.masked_fill(batch.targets == IGNORE_INDEX, 0.0)
