"""The gated activation of an MLP between its LoRA layers, act(gate) * up, together with what the adapters add.

On a GPU, forward and backward are one Triton kernel each, which reads the large products once, so that adapters add
nothing to the memory traffic. Elsewhere plain torch computes the same, and the kernels are tested against it.

Shapes: N tokens, F the MLP's width, R the ranks of gate, up and down.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from qlora_fsdp.layers.kernels.launch import runs_kernels

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
    if runs_kernels(gate_up_N2F):
        from qlora_fsdp.layers.kernels import triton_gate

        return triton_gate.forward(gate_up_N2F, h_NR, b_gate, b_up, a_down, activation)
    gate, up = _with_adapters(gate_up_N2F, h_NR, b_gate, b_up)
    act = _activate(gate, activation) * up
    return act, act @ a_down.t()


def gate_backward(
    gate_up_N2F: Tensor,
    h_NR: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    grad_act_NF: Tensor,
    grad_h_down_NR: Tensor,
    activation: Activation,
) -> Tensor:
    """The gradients of `gate_forward`'s inputs, and the activation once more, because forward did not keep it.

    Two arguments are overwritten: `gate_up_N2F` with its own gradient, and `grad_act_NF` with the activation. All
    others but the gradients are what `gate_forward` was given.

    Args:
        gate_up_N2F: x W^T of both base layers, side by side.
        h_NR: x A^T of both adapters, side by side.
        b_gate: [F, R], scaled.
        b_up: like `b_gate`.
        a_down: [R, F].
        grad_act_NF: gradient of the activation from the product with down's base weight, without the adapter's part.
        grad_h_down_NR: gradient of h_down.
        activation: the function that is applied to gate.

    Returns:
        The gradient of `h_NR`.
    """
    if runs_kernels(gate_up_N2F):
        from qlora_fsdp.layers.kernels import triton_gate

        return triton_gate.backward(gate_up_N2F, h_NR, b_gate, b_up, a_down, grad_act_NF, grad_h_down_NR, activation)
    gate, up = _with_adapters(gate_up_N2F, h_NR, b_gate, b_up)
    with torch.enable_grad():
        gate.requires_grad_()
        value = _activate(gate, activation)
    grad_act = grad_act_NF.addmm(grad_h_down_NR, a_down)
    (grad_gate,) = torch.autograd.grad(value, gate, grad_act * up)
    value = value.detach()
    grad_up = grad_act * value
    grad_act_NF.copy_(value * up)
    gate_up_N2F.copy_(torch.cat([grad_gate, grad_up], 1))
    return torch.cat([grad_gate @ b_gate, grad_up @ b_up], 1)


def _with_adapters(gate_up_N2F: Tensor, h_NR: Tensor, b_gate: Tensor, b_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up_N2F.chunk(2, 1)
    h_gate, h_up = h_NR.split([b_gate.shape[1], b_up.shape[1]], 1)
    return gate.addmm(h_gate, b_gate.t()), up.addmm(h_up, b_up.t())


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return F.silu(gate)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh")
        case _:
            assert_never(activation)
