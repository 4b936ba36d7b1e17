"""A causal language model that learns from preferences: which of two answers was chosen, or which answers were good.

The adapter as it was at the start, for passes without gradients beside the one that is trained.

Preference losses compare the model that is trained with a reference. Where training goes on from an adapter, the
reference is that adapter on the same base. A second model would take the base's memory twice. So only the trained
parameters are copied, sharded as they are, and for a pass of the reference they change places with the copies: values
are exchanged within the same memory, so that FSDP, the optimizer and a captured CUDA graph see the tensors that they
know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qlora_fsdp.common.sizes import IGNORE_INDEX
from qlora_fsdp.config.schema import PreferenceConfig
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.model.tasks.preference_loss import Pairs, figure_names, judged_losses, pair_losses
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor

Wanted = Literal["loss", "log_probs", "reference"]


class PreferenceLM(CausalLM):
    """A PEFT-wrapped causal language model with the loss of a preference.

    The reference costs no second model. It is the same sharded base without the adapter, or with the adapter that
    training started from: its log-probabilities come with the batch, computed before the first step
    (`training/reference.py`), or from a pass without gradient.

    Args:
        model: the wrapped model, on meta or not.
        settings: the loss and its numbers.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.

    Attributes:
        starts_from_adapter: whether the reference is the adapter with which training starts, and not the base.
        frozen: that adapter, where passes of the reference are made during training.
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
        self.starts_from_adapter, self.frozen = False, cast(FrozenCopy | None, None)
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
        sums: Tensor = _SumRows.apply(both, batch.sequence_starts, batch.max_row_length)  # type: ignore[no-untyped-call]
        logps, num_tokens = sums[:, : batch.num_answers]
        return logps, num_tokens, router_loss

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """The answers' log-probabilities under the reference: float32 [num_answers], without gradient."""
        with self._reference():
            return self._log_probs(batch)[0]

    @contextmanager
    def _reference(self) -> Iterator[None]:
        """A context in which the model is the reference: without dropout and gradient, and without LoRA.

        An adapter that training started from is part of the reference, and stays on.

        LoRA is not skipped but multiplied by zero. So the reference takes the path of the fused kernels that the
        trained model takes, and in bfloat16 rounds as that does. Before the first step, when the two are one model,
        their log-probabilities are equal to the bit. If LoRA were skipped, each product would round in another way.
        Over a thousand tokens this was a difference of a few nats, and the first loss was not that of a margin of zero.

        DoRA's magnitudes can't be multiplied away: such layers are switched off. PEFT's own `disable_adapter` would
        also change which parameters require gradients, which must not change under FSDP.
        """
        layers: list[Any] = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        layers = [] if self.starts_from_adapter else layers
        scalings = [dict(layer.scaling) for layer in layers]
        was_training = self.training
        self.eval()
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
            layer._disable_adapters = bool(layer.lora_variant)
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, scaling in zip(layers, scalings, strict=True):
                layer.scaling.update(scaling)
                layer._disable_adapters = False
            self.train(was_training)

    def freeze_start(self, keeps_copy: bool) -> None:
        """Make the adapter as it is now, which training starts from, part of the reference.

        Args:
            keeps_copy: whether the reference will still be computed once training has begun.
        """
        self.starts_from_adapter = True
        self.frozen = FrozenCopy(self) if keeps_copy else None

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
        sums, was_training = torch.zeros(2, dtype=torch.float64, device=processes.device), self.training
        self.eval()
        for batch in batches:
            assert batch.mismatched is not None
            mismatched = batch.mismatched.to(processes.device)
            logps = self(mismatched, "log_probs")
            if batch.reference is not None:
                reference = batch.reference[:, 1].to(processes.device)
            else:
                with nullcontext() if self.frozen is None else self.frozen.in_place():
                    reference = self(mismatched, "reference")
            sums += torch.stack([(logps - reference).double().sum(), sums.new_tensor(len(logps))])
        self.train(was_training)
        total, count = processes.sum(sums.tolist())
        self._moved(sums).fill_(max(0.0, total / max(1.0, count)))

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


class _SumRows(torch.autograd.Function):
    """Sums of K values of each token over the rows of a batch: [K, N] to [K, R], from starts [R + 1].

    Rows are laid side by side and summed, which gives the same sum in every run. On a GPU, adding up by index does not.
    The sum is in float64, because how a kernel divides a sum depends on its length: a sum of some thousand nats would
    differ by a thousandth. In backward each token looks up its row's gradient.
    """

    @staticmethod
    def forward(ctx: Any, values_KN: Tensor, starts: Tensor, longest: int) -> Tensor:
        starts = starts.long()
        columns = torch.arange(longest, device=starts.device)
        is_own = columns < starts.diff()[:, None]
        index = (starts[:-1, None] + columns) * is_own
        tokens = torch.arange(values_KN.shape[1], device=starts.device)
        ctx.save_for_backward(torch.searchsorted(starts, tokens, right=True) - 1)
        return (values_KN[:, index] * is_own).sum(2, dtype=torch.float64).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_of_token,) = ctx.saved_tensors
        return grads[0][:, row_of_token], None, None


class FrozenCopy:
    """A copy of this rank's rows of every trained parameter, as they are when it is made.

    It takes the memory of the adapter's shard once, where that is: on the GPU, or on the host with fsdp.cpu_offload.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.copies = [local_tensor(param).clone() for param in self.params]
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the model computes with the copies, without gradients. Every rank enters it.

        It is for whole calls of the model: it may not begin inside a forward, nor between a forward and its backward.
        """
        assert not self.is_in_place, "the copies are in place already"
        self._exchange()
        try:
            with torch.no_grad():
                yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange parameters and copies, one after another: no more than one parameter is held twice."""
        for param, copy in zip(self.params, self.copies, strict=True):
            local = local_tensor(param)
            held = local.clone()
            local.copy_(copy)
            copy.copy_(held)
        free_gathered(self.model)  # what is still gathered has the values of before
        self.is_in_place = not self.is_in_place
