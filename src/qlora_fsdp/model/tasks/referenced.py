"""A causal language model beside the reference that it is compared with: the frozen model before training.

The adapter as it was at the start, for passes without gradients beside the one that is trained.

Preference losses and divergences compare the model that is trained with a reference. Where training goes on from an
adapter, the reference is that adapter on the same base. A second model would take the base's memory twice. So only the
trained parameters are copied, sharded as they are, and for a pass of the reference they change places with the copies:
values are exchanged within the same memory, so that FSDP, the optimizer and a captured CUDA graph see the tensors that
they know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qlora_fsdp.layers.head_loss import LogitTransform, LossKernel
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.rows import local_tensor


class ReferencedLM(CausalLM):
    """A PEFT-wrapped causal language model that can be its own reference: without the adapter, or with its start.

    Args:
        model: the wrapped model, on meta or not.
        loss_kernel: see `CausalLM`, but not Liger's, which gives no losses of single tokens.
        transform: see `CausalLM`.

    Attributes:
        starts_from_adapter: whether the reference is the adapter with which training starts, and not the base.
        frozen: that adapter, where passes of the reference are made during training.
    """

    def __init__(self, model: peft.PeftModel, loss_kernel: LossKernel, transform: LogitTransform | None) -> None:
        super().__init__(model, loss_kernel, transform)
        self.starts_from_adapter = False
        self.frozen = cast(FrozenCopy | None, None)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
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
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
            layer._disable_adapters = bool(layer.lora_variant)
        try:
            with self.without_dropout(), torch.no_grad():
                yield
        finally:
            for layer, scaling in zip(layers, scalings, strict=True):
                layer.scaling.update(scaling)
                layer._disable_adapters = False

    def freeze_start(self, keeps_copy: bool) -> None:
        """Make the adapter as it is now, which training starts from, part of the reference.

        Args:
            keeps_copy: whether the reference will still be computed once training has begun.
        """
        self.starts_from_adapter = True
        self.frozen = FrozenCopy(self) if keeps_copy else None


class SumRows(torch.autograd.Function):
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
