"""A causal language model that learns from preferences: which of two answers was chosen, or which answers were good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import peft
import torch
from torch import Tensor

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import PreferenceConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.model.tasks.preference_loss import Pairs, figure_names, judged_losses, pair_losses
from qlora_fsdp.model.tasks.referenced import ReferencedLM, SumRows
from qlora_fsdp.runtime.processes import Processes

Wanted = Literal["loss", "log_probs", "reference"]


class PreferenceLM(ReferencedLM):
    """A PEFT-wrapped causal language model with the loss of a preference.

    The reference costs no second model. It is the same sharded base without the adapter, or with the adapter that
    training started from: its log-probabilities come with the batch, computed before the first step
    (`training/reference.py`), or from a pass without gradient.

    Args:
        model: the wrapped model, on meta or not.
        settings: the loss and its numbers.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.
    """

    def __init__(
        self,
        model: peft.PeftModel,
        settings: PreferenceConfig,
        loss_kernel: LossKernel,
        transform: LogitTransform | None,
    ) -> None:
        super().__init__(model, loss_kernel, transform)
        self.settings = settings
        self.figure_names = figure_names(self.settings)
        self.looks_ahead = not self.settings.loss.is_paired
        self._kl: Tensor | None = None  # float32 scalar on the device, whose memory stays the same

    def forward(self, batch: Batch, wants: Wanted = "loss") -> Tensor:
        """Sum of the losses of the batch's pairs or answers, not divided by their number: float32 scalar.

        Args:
            batch: answers, and no other rows.
            wants: what to return: the loss, or float32 [num_answers], the answers' log-probabilities under the model or
                under the reference. FSDP gathers only in calls of the whole model, so all three go through `forward`.
        """
        match wants:
            case "log_probs":
                return self._log_probs(batch)[0]
            case "reference":
                return self.reference_log_probs(batch)
            case "loss":
                return self._loss(batch)

    def _loss(self, batch: Batch) -> Tensor:
        reference = batch.reference
        if reference is None and self.settings.loss.needs_reference:
            reference = self.reference_log_probs(batch)
        logps, num_tokens, router_loss = self._log_probs(batch)
        is_real = torch.ones_like(logps, dtype=torch.bool) if batch.is_answer is None else batch.is_answer
        # Padding answers are masked below. Until then they have numbers whose losses have finite gradients.
        logps, num_tokens = logps.masked_fill(~is_real, -1.0), num_tokens.masked_fill(~is_real, 1.0)
        if self.settings.loss.is_paired:
            by_pairs, is_real = None if reference is None else reference.view(-1, 2), is_real[::2]
            pairs = Pairs(logps.view(-1, 2), num_tokens.view(-1, 2), by_pairs)
            losses, values = pair_losses(pairs, self.settings)
            is_about = is_real.expand_as(values)
        else:
            assert reference is not None and batch.is_good is not None
            own = reference if reference.ndim == 1 else reference[:, 0]
            losses, values, is_about = judged_losses(logps, own, batch.is_good, self._moved(logps), self.settings)
            is_about = is_about & is_real
        self.add_figures(values, is_about)
        loss = losses.masked_fill(~is_real, 0.0).sum()
        return loss if router_loss is None else loss + router_loss * is_real.sum()

    def _log_probs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities and tokens of each answer, float32 [num_answers], and the router's loss or None."""
        losses, router_loss = self.losses(batch, "none")
        is_target = (batch.targets != IGNORE_INDEX).float()
        both = torch.stack([-losses.flatten(), is_target.flatten()])
        sums: Tensor = SumRows.apply(both, batch.sequence_starts, batch.max_row_length)  # type: ignore[no-untyped-call]
        logps, num_tokens = sums[:, : batch.num_answers]
        return logps, num_tokens, router_loss

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """The answers' log-probabilities under the reference: float32 [num_answers], without gradient."""
        with self.as_reference():
            return self._log_probs(batch)[0]

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference's log-probabilities, if the reference has a frozen copy of an adapter.

        The copy changes places with the adapter, which FSDP allows only between calls of the whole model.
        """
        if self.frozen is None or batch.reference is not None:
            return batch
        with self.frozen.in_place():
            return replace(batch, reference=self(batch, "reference"))

    def reference_of(self, batch: Batch) -> Tensor:
        """The reference's log-probabilities for `Batch.reference`: float32 [num_rows, 2] on the device."""
        values: Tensor = self(batch, "reference")
        if batch.mismatched is None:
            return values.view(-1, 2)
        return torch.stack([values[: batch.mismatched.num_answers], self(batch.mismatched, "reference")], 1)

    @torch.no_grad()
    def look_ahead(self, batches: Iterable[Batch], processes: Processes) -> None:
        """Find how far the model has moved from the reference, over all batches and ranks. KTO's loss needs this.

        Args:
            batches: this rank's, of a whole step or evaluation, before their losses are computed.
            processes: all ranks take part.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
        with self.without_dropout():
            self._add_divergences(batches, sums)
        total, count = processes.sum(sums.tolist())
        self._moved(sums).fill_(max(0.0, total / max(1.0, count)))

    def _add_divergences(self, batches: Iterable[Batch], sums: Tensor) -> None:
        """Adds to float64 `sums` [2] how far this rank's answers are from the reference, and how many there are."""
        for batch in batches:
            assert batch.mismatched is not None
            mismatched = batch.mismatched.to(sums.device)
            logps = self(mismatched, "log_probs")
            if batch.reference is not None:
                reference = batch.reference[:, 1].to(sums.device)
            else:
                with nullcontext() if self.frozen is None else self.frozen.in_place():
                    reference = self(mismatched, "reference")
            sums += torch.stack([(logps - reference).double().sum(), sums.new_tensor(len(logps))])

    def _moved(self, like: Tensor) -> Tensor:
        """How far the model has moved from the reference, as `look_ahead` found it last; 0 before that.

        It is always the same tensor, so a CUDA graph of the loss reads what is written into it later.
        """
        if self._kl is None:
            self._kl = torch.zeros((), device=like.device)
        return self._kl

    def add_sums(self, sums: Tensor) -> None:
        """As in `TaskModel`; kl may be missing, and is added here."""
        if len(sums) < len(self.figure_names):
            kl = self._moved(sums).double()
            sums = torch.cat([sums, torch.stack([kl, torch.ones_like(kl)])[None]])
        super().add_sums(sums)

    def name_figures(self, sums: Sequence[float]) -> dict[str, float]:
        """As in `TaskModel`. The margin of single answers is that of the means."""
        figures = super().name_figures(sums)
        means = [figures.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if "rewards/margins" not in self.figure_names and means[0] is not None and means[1] is not None:
            figures["rewards/margins"] = means[0] - means[1]
        return figures
