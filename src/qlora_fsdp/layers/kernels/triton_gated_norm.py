"""Triton kernels of RMSNorm times SiLU of a gate (layers/recurrent/gated_norm.py). The weight is frozen."""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

TILE = 4096  # elements of a program: several vectors, as these are a head's


@kernel
@triton.jit
def _forward_kernel(x, gate, weight, y, num_vectors, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    vectors = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK)
    is_channel = channels < width
    is_there = (vectors < num_vectors)[:, None] & is_channel[None, :]
    places = vectors[:, None] * width + channels[None, :]
    values = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32)
    opening = tl.load(gate + places, mask=is_there, other=0.0).to(tl.float32)
    factors = tl.load(weight + channels, mask=is_channel, other=0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    normed = (values * scale[:, None]).to(x.dtype.element_ty) * factors[None, :]  # rounds as transformers does
    result = normed.to(tl.float32) * (opening * tl.sigmoid(opening))
    tl.store(y + places, result.to(y.dtype.element_ty), mask=is_there)


@kernel
@triton.jit
def _backward_kernel(
    x,
    gate,
    weight,
    grad_y,
    grad_x,
    grad_gate,
    num_vectors,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    vectors = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK)
    is_channel = channels < width
    is_there = (vectors < num_vectors)[:, None] & is_channel[None, :]
    places = vectors[:, None] * width + channels[None, :]
    values = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32)
    opening = tl.load(gate + places, mask=is_there, other=0.0).to(tl.float32)
    factors = tl.load(weight + channels, mask=is_channel, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + places, mask=is_there, other=0.0).to(tl.float32) * factors[None, :]
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    normed = values * scale
    sigmoid = tl.sigmoid(opening)
    of_gate = grad * normed * sigmoid * (1.0 + opening * (1.0 - sigmoid))
    tl.store(grad_gate + places, of_gate.to(grad_gate.dtype.element_ty), mask=is_there)
    grad *= opening * sigmoid
    of_x = scale * (grad - normed * (tl.sum(grad * normed, 1) / width)[:, None])
    tl.store(grad_x + places, of_x.to(grad_x.dtype.element_ty), mask=is_there)


def forward(x_ND: Tensor, gate_ND: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x, times weight, times SiLU of the gate; all contiguous, [N, D]."""
    y = torch.empty_like(x_ND)
    num_vectors, width = x_ND.shape
    rows, block = _tile(width)
    _forward_kernel[(triton.cdiv(num_vectors, rows),)](
        x_ND, gate_ND, weight, y, num_vectors, width, eps, ROWS=rows, BLOCK=block, num_warps=4
    )
    return y


def backward(x_ND: Tensor, gate_ND: Tensor, weight: Tensor, eps: float, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate."""
    grad_x = torch.empty_like(x_ND)
    grad_gate = torch.empty_like(gate_ND)
    num_vectors, width = x_ND.shape
    rows, block = _tile(width)
    _backward_kernel[(triton.cdiv(num_vectors, rows),)](
        x_ND, gate_ND, weight, grad_y, grad_x, grad_gate, num_vectors, width, eps, ROWS=rows, BLOCK=block, num_warps=4
    )
    return grad_x, grad_gate


def _tile(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return max(1, TILE // block), block
