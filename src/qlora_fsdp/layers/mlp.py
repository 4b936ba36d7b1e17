"""A gated MLP of quantized LoRA layers, down(act(gate(x)) * up(x)), as two functions that keep little for backward.

They keep the input and the two products of gate and up. The activation is computed again in the same pass over memory
that computes its gradient (`gated_activation.py`). Gate and up are two layers, or one layer with both outputs side by
side and one adapter (Phi 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.gated_activation import Activation, gate_backward, gate_forward
from qlora_fsdp.layers.lora import LoraLinear, LoraPart, active_part, add_low_rank, in_dtype, mm_fp32
from qlora_fsdp.layers.norm import LastNorm, Recompute, recompute_input
from qlora_fsdp.layers.quantized.matmul import Addend

MAX_RANK = 64  # with larger adapters, a tile of the kernels (layers/kernels/triton_gate.py) takes too many registers


class GatedMlp:
    """The forward of a gated MLP.

    Args:
        mlp: the module. Its own forward computes what cannot be computed here: dropout, adapters that are off.
        layers: gate and up, or one layer for both; and down.
        activation: the function that is applied to gate.
    """

    def __init__(self, mlp: nn.Module, layers: Sequence[LoraLinear], activation: Activation) -> None:
        self.plain = mlp.forward
        self.layers = list(layers)
        self.activation = activation

    @property
    def last_norm(self) -> LastNorm | None:
        """The `LastNorm` that knows whether the input is a norm's output."""
        return self.layers[0].last_norm

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BI -> y_BI."""
        return self._compute(x, True, *args, **kwargs)

    def again(self, x: Tensor) -> Tensor:
        """Compute again what backward needs: all but down's product."""
        return self._compute(x, False)

    def _compute(self, x: Tensor, has_values: bool, *args: Any, **kwargs: Any) -> Tensor:
        found = [active_part(layer) for layer in self.layers]
        parts = [part for part in found if part is not None]
        if len(parts) < len(self.layers) or args or kwargs:
            return self.plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        *wide, down = parts
        kept, recompute = (None, None) if self.last_norm is None else self.last_norm.source_of(x)
        weights = [*(p.lora_a.weight for p in wide), *(p.lora_b.weight for p in wide), down.lora_a.weight]
        act, h_down = _Gate.apply(x, kept, recompute, wide, self.activation, *weights)  # type: ignore[no-untyped-call]
        return add_low_rank(act, h_down, [down], h_is_of_x=False, has_values=has_values)[0]


class _Gate(torch.autograd.Function):
    """act(gate(x)) * up(x), and its product with down's A."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kept: Tensor | None,
        recompute: Recompute | None,
        parts: Sequence[LoraPart],
        activation: Activation,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x_NI = x.reshape(-1, x.shape[-1])
        layers = [part.layer for part in parts]
        a_RI, small = _factors(parts, weights, x.dtype)
        h_NR = x_NI @ a_RI.t()
        gate_up = layers[0].matmul.joint_output(x_NI, layers)
        act, h_down = gate_forward(gate_up, _for_both(h_NR, parts), *small, activation)
        ctx.save_for_backward(x_NI if kept is None else kept, gate_up, h_NR, *weights)
        ctx.recompute = recompute
        ctx.parts = parts
        ctx.activation = activation
        ctx.shape = x.shape
        return act.view(*x.shape[:-1], act.shape[1]), h_down

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept, gate_up, h_NR, *weights = ctx.saved_tensors
        parts: Sequence[LoraPart] = ctx.parts
        grad_act = grads[0].reshape(-1, gate_up.shape[1] // 2)
        grad_h_down = grads[1].contiguous()
        a_RI, small = _factors(parts, weights, gate_up.dtype)
        scalings = (parts[0].scaling, parts[-1].scaling)
        grad_h, *grads_b, grad_a_down = gate_backward(
            gate_up, _for_both(h_NR, parts), *small, grad_act, grad_h_down, ctx.activation, scalings
        )
        if len(parts) == 1:
            grad_h = torch.add(*grad_h.chunk(2, 1))
            grads_b = [torch.cat(grads_b)]
        grads_NO = gate_up.split([part.layer.out_features for part in parts], 1)  # gate_up holds their gradient now
        del grad_act, grads
        grad_x = None
        if ctx.needs_input_grad[0]:
            addend = Addend(grad_h, a_RI)
            grad_x = parts[0].layer.matmul.input_grad(grads_NO, [p.layer for p in parts], addend).view(ctx.shape)
        x_NI = recompute_input(kept, ctx.recompute)
        grads_a = mm_fp32(grad_h.t(), x_NI).split([part.lora_b.in_features for part in parts])
        return (grad_x, None, None, None, None, *grads_a, *grads_b, grad_a_down)


def _for_both(h_NR: Tensor, parts: Sequence[LoraPart]) -> Tensor:
    """x A^T of gate and of up, side by side. One layer for both has one adapter, whose x A^T serves both."""
    return h_NR if len(parts) == 2 else h_NR.repeat(1, 2)


def _factors(
    parts: Sequence[LoraPart], weights: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A of gate and up, one below the other; and B of gate and of up, scaled, and A of down; in the compute dtype."""
    *others, a_down = weights
    lora_a = others[: len(parts)]
    lora_b = others[len(parts) :]
    scalings = [part.scaling for part in parts]
    a_RI, a_down, *lora_b = in_dtype(dtype, [*lora_a, a_down, *lora_b], scalings, num_joined=len(parts))
    b_gate, b_up = lora_b if len(parts) == 2 else lora_b[0].chunk(2)
    return a_RI, (b_gate, b_up, a_down)
