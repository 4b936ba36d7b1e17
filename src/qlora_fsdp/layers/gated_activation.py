"""The gated activation of an MLP between its LoRA layers: act(gate) * up, with what the adapters add made on the way.

On a GPU one Triton kernel a pass reads the large products once: adapters add nothing to the memory traffic. Elsewhere,
plain torch, which is also what the kernels are tested against.

Shapes: N tokens, F the MLP's width, R ranks (of gate, up and down).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gate_forward(
    gate_up_N2F: Tensor, h_NR: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """act(gate + h_gate B_gate^T) * (up + h_up B_up^T), and its product with A_down^T.

    Args:
        gate_up_N2F: x W^T of both base layers, side by side.
        h_NR: x A^T of both adapters, side by side.
        b_gate: [F, R], scaled, in the dtype of `h_NR`.
        b_up: the same.
        a_down: [R, F].
        activation: `silu`, or `gelu_tanh`.

    Returns:
        The activation [N, F], and h_down [N, R].
    """
    if gate_up_N2F.is_cuda:
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
    activation: str,
) -> Tensor:
    """The gradients of `gate_forward`'s inputs, and the activation once more, which nobody has kept.

    In place: `gate_up_N2F` becomes the gradient of gate and up, `grad_act_NF` the activation.

    Args:
        gate_up_N2F: as in forward, and so `h_NR`, `b_gate`, `b_up`, `a_down` and `activation`.
        h_NR: see above.
        b_gate: see above.
        b_up: see above.
        a_down: see above.
        grad_act_NF: gradient of the activation from the product with down's base weight, without the adapter's part.
        grad_h_down_NR: gradient of h_down.
        activation: see above.

    Returns:
        The gradient of `h_NR`.
    """
    if gate_up_N2F.is_cuda:
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


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
