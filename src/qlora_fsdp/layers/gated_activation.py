"""The gated activation of an MLP between its LoRA layers, act(gate) * up, together with what the adapters add.

On a GPU, forward and backward in 16 bits are one Triton kernel each, which reads the large products once, so that
adapters add little to the memory traffic. Elsewhere plain torch computes the same.

Shapes: N tokens, F the MLP's width, R the ranks of gate, up and down.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from qlora_fsdp.layers.kernels.launch import runs_kernels
from qlora_fsdp.layers.lora import mm_fp32

Activation = Literal["silu", "gelu_tanh"]


def gate_forward(
    gate_up_N2F: Tensor, h_NR: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """act(gate + h_gate B_gate^T) * (up + h_up B_up^T), and its product with A_down^T.

    Args:
        gate_up_N2F: x W^T of both base layers, side by side.
        h_NR: x A^T of both adapters, side by side.
        b_gate: [F, R], scaled, in the dtype of `h_NR`.
        b_up: like `b_gate`.
        a_down: [R, F].
        activation: the function that is applied to gate.

    Returns:
        The activation [N, F], and h_down [N, R].
    """
    if _fits_kernels(gate_up_N2F):
        from qlora_fsdp.layers.kernels import triton_gate

        return triton_gate.forward(gate_up_N2F, h_NR, b_gate, b_up, a_down, activation)
    gate, up = _with_adapters(gate_up_N2F, h_NR, b_gate, b_up)
    act = _activate(gate, activation) * up
    return act, act @ a_down.t()


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
    gate_up_N2F: Tensor,
    h_NR: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    grad_act_NF: Tensor,
    grad_h_down_NR: Tensor,
    activation: Activation,
    scalings: tuple[float, float],
) -> GateGrads:
    """The gradients of `gate_forward`'s inputs.

    `gate_up_N2F` is overwritten with its own gradient, and what `grad_act_NF` holds afterwards is not to be used. All
    other arguments but the gradients are what `gate_forward` was given.

    Args:
        gate_up_N2F: x W^T of both base layers, side by side.
        h_NR: x A^T of both adapters, side by side.
        b_gate: [F, R], scaled.
        b_up: like `b_gate`.
        a_down: [R, F].
        grad_act_NF: gradient of the activation from the product with down's base weight, without the adapter's part.
        grad_h_down_NR: gradient of h_down.
        activation: the function that is applied to gate.
        scalings: what gate's B and up's were multiplied by.
    """
    if not _fits_kernels(gate_up_N2F):
        grad_h = _plain_backward(gate_up_N2F, h_NR, b_gate, b_up, a_down, grad_act_NF, grad_h_down_NR, activation)
    else:
        from qlora_fsdp.layers.kernels import triton_gate_backward as kernels

        small = (h_NR, b_gate, b_up, a_down)
        if max(b_gate.shape[1], b_up.shape[1], a_down.shape[0]) <= kernels.MAX_RANK_DOWN:
            grads = kernels.down_columns(gate_up_N2F, *small, grad_act_NF, grad_h_down_NR, activation, scalings)
            return GateGrads(*grads)
        grad_h = kernels.along_rows(gate_up_N2F, *small, grad_act_NF, grad_h_down_NR, activation)
    grad_gate, grad_up = gate_up_N2F.chunk(2, 1)
    h_gate, h_up = _split_h(h_NR, b_gate, b_up)
    return GateGrads(
        grad_h,
        mm_fp32(grad_gate.t(), h_gate).mul_(scalings[0]),
        mm_fp32(grad_up.t(), h_up).mul_(scalings[1]),
        mm_fp32(grad_h_down_NR.t(), grad_act_NF),
    )


def _plain_backward(
    gate_up_N2F: Tensor,
    h_NR: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    grad_act_NF: Tensor,
    grad_h_down_NR: Tensor,
    activation: Activation,
) -> Tensor:
    """The gradient of h. Writes the activation over `grad_act_NF`, because forward did not keep it."""
    gate, up = _with_adapters(gate_up_N2F, h_NR, b_gate, b_up)
    value = _activate(gate, activation)
    grad_act = grad_act_NF.addmm(grad_h_down_NR, a_down)
    grad_gate = _activate_backward(grad_act * up, gate, activation)
    grad_up = grad_act * value
    grad_act_NF.copy_(value * up)
    gate_up_N2F.copy_(torch.cat([grad_gate, grad_up], 1))
    return torch.cat([grad_gate @ b_gate, grad_up @ b_up], 1)


def _fits_kernels(x: Tensor) -> bool:
    """Whether the kernels compute with a tensor. In float32 their tiles want more than many GPUs have for a block."""
    return runs_kernels(x) and x.dtype.itemsize == 2


def _split_h(h_NR: Tensor, b_gate: Tensor, b_up: Tensor) -> tuple[Tensor, Tensor]:
    rank = b_gate.shape[1]
    return h_NR[:, :rank], h_NR[:, rank : rank + b_up.shape[1]]


def _with_adapters(gate_up_N2F: Tensor, h_NR: Tensor, b_gate: Tensor, b_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up_N2F.chunk(2, 1)
    h_gate, h_up = _split_h(h_NR, b_gate, b_up)
    return gate.addmm(h_gate, b_gate.t()), up.addmm(h_up, b_up.t())


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
