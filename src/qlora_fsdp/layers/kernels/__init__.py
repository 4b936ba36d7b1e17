"""Triton kernels, and 4-bit quantization on a CPU: plain tensors go in and come out.

A Triton kernel gets every pointer, size and stride as an argument of its own, and can't call the code around it. So
kernels have more parameters and more lines than functions elsewhere in this project.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


class GateInputs(NamedTuple):
    """What a gated activation is computed from: N tokens, F the MLP's width, R the ranks of gate, up and down.

    Attributes:
        gate_up_N2F: x W^T of both base layers, side by side.
        h_NR: x A^T of both adapters, side by side.
        b_gate: [F, R], scaled, in the dtype of `h_NR`.
        b_up: like `b_gate`.
        a_down: [R, F].
        activation: the function that is applied to gate.
    """

    gate_up_N2F: Tensor
    h_NR: Tensor
    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor
    activation: Activation
