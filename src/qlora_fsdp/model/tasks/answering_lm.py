"""A causal language model that writes answers and learns from them, whatever tells it how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import peft
from torch import Tensor

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.config.schema import RolloutConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.layers.lora import has_zero_gradient_at_start
from qlora_fsdp.model.tasks.mismatch import BINS, MISMATCH, mismatch_of_share
from qlora_fsdp.model.tasks.referenced import ReferencedLM


class AnsweringLM(ReferencedLM):
    """A PEFT-wrapped causal language model that learns from answers which it has written itself.

    Log-probabilities are those of logits divided by `rollout.temperature`, as the answers were drawn by.

    Args:
        model: the wrapped model, on meta or not.
        rollout: how answers are written.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.
        figures: what the loss tells besides, before the bins of the mismatch between slots and training.

    Attributes:
        learns: whether there is something to learn from the answers of the step that is computed. If not, gradients of
            zeros are as they should be.
        has_learned: whether there was in an earlier step.

    Raises:
        ConfigError: the temperature is not 1, and the model caps its logits or makes them in a way of its own.
    """

    def __init__(
        self,
        model: peft.PeftModel,
        rollout: RolloutConfig,
        loss_kernel: LossKernel,
        transform: LogitTransform | None,
        figures: Sequence[str],
    ) -> None:
        super().__init__(model, loss_kernel, _at_temperature(transform, rollout.temperature))
        self.figure_names = (*figures, *BINS)
        self.learns = True
        self.has_learned = False

    def may_get_zero_gradient(self, name: str) -> bool:
        """All may where there is nothing to learn; and LoRA's A until B is not zero any more."""
        is_at_start = has_zero_gradient_at_start(name) and not self.has_learned
        return not self.learns or is_at_start or super().may_get_zero_gradient(name)

    def head_inputs(self, batch: Batch) -> Tensor:
        """What the head would get of the tokens at `label_positions`, [num_labels, D]."""
        assert batch.label_positions is not None
        return self.hidden_states(batch)[batch.label_positions]

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """As in `TaskModel`; of the bins of the mismatch it is the share of tokens below which it tells."""
        figures = super().name_figures(sums)
        shares = [figures.pop(name, 0.0) for name in BINS]
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
