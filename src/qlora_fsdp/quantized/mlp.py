"""A gated MLP of quantized LoRA layers, down(act(gate(x)) * up(x)), as two functions that keep little.

Kept for backward: the input and the two products of gate and up. The activation is made again in the same pass over
memory that makes its gradient (`gate.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from qlora_fsdp.quantized.gate import gate_backward, gate_forward
from qlora_fsdp.quantized.lora import LoraPart, add_low_rank, join, mm_fp32, origin_of, quantized_part, remade
from qlora_fsdp.quantized.matmul import Addend


class GatedMlp:
    """The forward of an MLP whose layers are `gate_proj`, `up_proj` and `down_proj`.

    Args:
        mlp: the module; it keeps its own forward for what is not computed here (dropout, adapters that are off).
        activation: `silu` or `gelu_tanh`.
    """

    def __init__(self, mlp: nn.Module, activation: str) -> None:
        self.mlp, self.activation, self.plain = mlp, activation, mlp.forward

    def __call__(self, x: Tensor) -> Tensor:
        """x_BI -> y_BI."""
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (quantized_part(cast(nn.Module, getattr(self.mlp, name))) for name in names)
        if gate is None or up is None or down is None:
            return self.plain(x)  # type: ignore[no-any-return]
        weights = [p.weight for p in (gate.lora_a, up.lora_a, gate.lora_b, up.lora_b, down.lora_a)]
        act, h_down = _Gate.apply(x, *origin_of(x), (gate, up), self.activation, *weights)  # type: ignore[no-untyped-call]
        return add_low_rank(act, h_down, [down], h_is_of_x=False)[0]


class _Gate(torch.autograd.Function):
    """act(gate(x)) * up(x), and its product with down's A."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        origin: Tensor | None,
        make: Callable[[Tensor], Tensor] | None,
        parts: tuple[LoraPart, LoraPart],
        activation: str,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x_NI, layers = x.reshape(-1, x.shape[-1]), [part.layer for part in parts]
        h_NR = x_NI @ join(weights[:2], x.dtype).t()
        gate_up = layers[0].matmul.joint_output(x_NI, layers)
        act, h_down = gate_forward(gate_up, h_NR, *_small(parts, weights, x.dtype), activation)
        ctx.save_for_backward(x_NI if origin is None else origin, gate_up, h_NR, *weights)
        ctx.make, ctx.parts, ctx.activation, ctx.shape = make, parts, activation, x.shape
        return act.view(*x.shape[:-1], act.shape[1]), h_down

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept, gate_up, h_NR, *weights = ctx.saved_tensors
        parts: tuple[LoraPart, LoraPart] = ctx.parts
        grad_act, grad_h_down = grads[0].reshape(-1, gate_up.shape[1] // 2), grads[1].contiguous()
        small = _small(parts, weights, gate_up.dtype)
        grad_h = gate_backward(gate_up, h_NR, *small, grad_act, grad_h_down, ctx.activation)
        grad_a_down = mm_fp32(grad_h_down.t(), grad_act)  # which holds the activation now
        grads_NO, ranks = gate_up.chunk(2, 1), [part.lora_b.in_features for part in parts]
        grads_b = [
            mm_fp32(grad.t(), h).mul_(part.scaling)
            for grad, h, part in zip(grads_NO, h_NR.split(ranks, 1), parts, strict=True)
        ]
        del grad_act, grads
        grad_x = None
        if ctx.needs_input_grad[0]:
            addend = Addend(grad_h, join(weights[:2], grad_h.dtype))
            grad_x = parts[0].layer.matmul.input_grad(grads_NO, [p.layer for p in parts], addend).view(ctx.shape)
        x_NI = remade(kept, ctx.make)
        grads_a = mm_fp32(grad_h.t(), x_NI).split(ranks)
        return (grad_x, None, None, None, None, *grads_a, *grads_b, grad_a_down)


def _small(parts: tuple[LoraPart, LoraPart], weights: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """B of gate and up, scaled, and A of down, all contiguous in the compute dtype."""
    _, _, b_gate, b_up, a_down = weights
    return (b_gate * parts[0].scaling).to(dtype), (b_up * parts[1].scaling).to(dtype), a_down.to(dtype)
