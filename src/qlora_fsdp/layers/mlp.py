"""A gated MLP of quantized LoRA layers, down(act(gate(x)) * up(x)), as two functions that keep little for backward.

They keep the input and the two products of gate and up. The activation is computed again in the same pass over memory
that computes its gradient (`gate_backward`). Gate and up are two layers, or one layer with both outputs side by
side and one adapter (Phi 3).

The gated activation, act(gate) * up, is computed together with what the adapters add. On a GPU, forward and backward in
16 bits are one Triton kernel each, which reads the large products once, so that adapters add little to the memory
traffic. Elsewhere plain torch computes the same.

Shapes: N tokens, F the MLP's width, R the ranks of gate, up and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import assert_never

from qlora_fsdp.layers.kernels import Activation, GateInputs
from qlora_fsdp.layers.kernels.launch import runs_kernels
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
        act, h_down = gate_forward(GateInputs(gate_up, _for_both(h_NR, parts), *small, activation))
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
            GateInputs(gate_up, _for_both(h_NR, parts), *small, ctx.activation), grad_act, grad_h_down, scalings
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


def gate_forward(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    """act(gate + h_gate B_gate^T) * (up + h_up B_up^T) [N, F], and its product with A_down^T, h_down [N, R]."""
    if _fits_kernels(inputs.gate_up_N2F):
        from qlora_fsdp.layers.kernels import triton_gate

        return triton_gate.forward(inputs)
    gate, up = _with_adapters(inputs)
    act = _activate(gate, inputs.activation) * up
    return act, act @ inputs.a_down.t()


class GateGrads(NamedTuple):
    """The gradients of what adapters hand to `gate_forward`.

    Attributes:
        h_NR: of x A^T of both adapters, in its dtype.
        b_gate: of the adapter's B before it is scaled, [F, R] in float32.
        b_up: like `b_gate`.
        a_down: [R, F], float32.
    """

    h_NR: Tensor
    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor


def gate_backward(
    inputs: GateInputs, grad_act_NF: Tensor, grad_h_down_NR: Tensor, scalings: tuple[float, float]
) -> GateGrads:
    """The gradients of `gate_forward`'s inputs.

    Args:
        inputs: what `gate_forward` was given. `gate_up_N2F` is overwritten with its own gradient.
        grad_act_NF: gradient of the activation from the product with down's base weight, without the adapter's part.
            What it holds afterwards is not to be used.
        grad_h_down_NR: gradient of h_down.
        scalings: what gate's B and up's were multiplied by.
    """
    if not _fits_kernels(inputs.gate_up_N2F):
        grad_h = _plain_backward(inputs, grad_act_NF, grad_h_down_NR)
    else:
        from qlora_fsdp.layers.kernels import triton_gate as kernels

        ranks = (inputs.b_gate.shape[1], inputs.b_up.shape[1], inputs.a_down.shape[0])
        if max(ranks) <= kernels.MAX_RANK_DOWN:
            return GateGrads(*kernels.down_columns(inputs, grad_act_NF, grad_h_down_NR, scalings))
        grad_h = kernels.along_rows(inputs, grad_act_NF, grad_h_down_NR)
    grad_gate, grad_up = inputs.gate_up_N2F.chunk(2, 1)
    h_gate, h_up = _split_h(inputs)
    return GateGrads(
        grad_h,
        mm_fp32(grad_gate.t(), h_gate).mul_(scalings[0]),
        mm_fp32(grad_up.t(), h_up).mul_(scalings[1]),
        mm_fp32(grad_h_down_NR.t(), grad_act_NF),
    )


def _plain_backward(inputs: GateInputs, grad_act_NF: Tensor, grad_h_down_NR: Tensor) -> Tensor:
    """The gradient of h. Writes the activation over `grad_act_NF`, because forward did not keep it."""
    gate, up = _with_adapters(inputs)
    value = _activate(gate, inputs.activation)
    grad_act = grad_act_NF.addmm(grad_h_down_NR, inputs.a_down)
    grad_gate = _activate_backward(grad_act * up, gate, inputs.activation)
    grad_up = grad_act * value
    grad_act_NF.copy_(value * up)
    inputs.gate_up_N2F.copy_(torch.cat([grad_gate, grad_up], 1))
    return torch.cat([grad_gate @ inputs.b_gate, grad_up @ inputs.b_up], 1)


def _fits_kernels(x: Tensor) -> bool:
    """Whether the kernels compute with a tensor. In float32 their tiles want more than many GPUs have for a block."""
    return runs_kernels(x) and x.dtype.itemsize == 2


def _split_h(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    rank = inputs.b_gate.shape[1]
    return inputs.h_NR[:, :rank], inputs.h_NR[:, rank : rank + inputs.b_up.shape[1]]


def _with_adapters(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    gate, up = inputs.gate_up_N2F.chunk(2, 1)
    h_gate, h_up = _split_h(inputs)
    return gate.addmm(h_gate, inputs.b_gate.t()), up.addmm(h_up, inputs.b_up.t())


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return F.silu(gate)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh")
        case _:
            assert_never(activation)


def _activate_backward(grad: Tensor, gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return torch.ops.aten.silu_backward(grad, gate)  # type: ignore[no-any-return]
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")  # type: ignore[no-any-return]
        case _:
            assert_never(activation)
