"""Triton kernels of RMSNorm (arXiv:1910.07467), with or without a residual beside it (layers/norm.py).

The same times SiLU of a gate (layers/recurrent/gated_norm.py). Imported on GPUs only. A frozen weight needs no
gradient, so rows have nothing to do with one another.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

TILE = 2048  # elements of a program: several rows, where they are short
GATED_TILE = 4096  # elements of a program: several vectors, as these are a head's


@kernel
@triton.jit
def _norm_forward_kernel(
    x,
    weight,
    y,
    scales,
    num_rows,
    width,
    eps,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_row, is_column = rows < num_rows, columns < width
    places, is_there = rows[:, None] * width + columns[None, :], is_row[:, None] & is_column[None, :]
    values = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(scales + rows, scale, mask=is_row)
    normed = values * scale[:, None]
    factors = tl.load(weight + columns, mask=is_column, other=0.0)
    if ROUNDS_FIRST:
        tl.store(y + places, normed.to(y.dtype.element_ty) * factors[None, :], mask=is_there)
    else:
        factors = factors.to(tl.float32) + offset
        tl.store(y + places, (normed * factors[None, :]).to(y.dtype.element_ty), mask=is_there)


@kernel
@triton.jit
def _norm_backward_kernel(
    x,
    weight,
    scales,
    grad_y,
    grad_residual,
    grad_x,
    num_rows,
    width,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_row, is_column = rows < num_rows, columns < width
    places, is_there = rows[:, None] * width + columns[None, :], is_row[:, None] & is_column[None, :]
    scale = tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
    normed = tl.load(x + places, mask=is_there, other=0.0).to(tl.float32) * scale
    grad = tl.load(grad_y + places, mask=is_there, other=0.0).to(tl.float32)
    grad *= (tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32) + offset)[None, :]
    total = scale * (grad - normed * (tl.sum(grad * normed, 1) / width)[:, None])
    if HAS_RESIDUAL:
        total += tl.load(grad_residual + places, mask=is_there, other=0.0).to(tl.float32)
    tl.store(grad_x + places, total.to(grad_x.dtype.element_ty), mask=is_there)


def forward(x_ND: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> tuple[Tensor, Tensor]:
    """x over its root mean square, times weight + offset; and one over the root mean square, float32 [N].

    Args:
        x_ND: contiguous.
        weight: [D].
        eps: is added to the mean square.
        offset: is added to the weight; 0 if `rounds_first`.
        rounds_first: whether x over its root mean square is rounded to the dtype of x before the weight multiplies it.
    """
    num_rows, width = x_ND.shape
    y, scales = torch.empty_like(x_ND), torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    grid, blocks = _blocks(num_rows, width)
    options = {"ROUNDS_FIRST": rounds_first, **blocks}
    _norm_forward_kernel[grid](x_ND, weight, y, scales, num_rows, width, eps, offset, **options)
    return y, scales


def backward(
    x_ND: Tensor, weight: Tensor, scales: Tensor, grad_y: Tensor, grad_residual: Tensor | None, offset: float
) -> Tensor:
    """The gradient of x through the norm, plus its gradient through the residual; all are [N, D] and contiguous."""
    num_rows, width = x_ND.shape
    grad_x, (grid, blocks) = torch.empty_like(x_ND), _blocks(num_rows, width)
    has_residual = grad_residual is not None
    _norm_backward_kernel[grid](
        x_ND,
        weight,
        scales,
        grad_y,
        grad_residual if has_residual else grad_y,
        grad_x,
        num_rows,
        width,
        offset,
        HAS_RESIDUAL=has_residual,
        **blocks,
    )
    return grad_x


def _blocks(num_rows: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return (triton.cdiv(num_rows, rows),), {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, block // 512))}


@kernel
@triton.jit
def _gated_forward_kernel(x, gate, weight, y, num_vectors, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
def _gated_backward_kernel(
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


def gated_forward(x_ND: Tensor, gate_ND: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x, times weight, times SiLU of the gate; all contiguous, [N, D]."""
    y = torch.empty_like(x_ND)
    num_vectors, width = x_ND.shape
    rows, block = _gated_tile(width)
    _gated_forward_kernel[(triton.cdiv(num_vectors, rows),)](
        x_ND, gate_ND, weight, y, num_vectors, width, eps, ROWS=rows, BLOCK=block, num_warps=4
    )
    return y


def gated_backward(x_ND: Tensor, gate_ND: Tensor, weight: Tensor, eps: float, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate."""
    grad_x = torch.empty_like(x_ND)
    grad_gate = torch.empty_like(gate_ND)
    num_vectors, width = x_ND.shape
    rows, block = _gated_tile(width)
    _gated_backward_kernel[(triton.cdiv(num_vectors, rows),)](
        x_ND, gate_ND, weight, grad_y, grad_x, grad_gate, num_vectors, width, eps, ROWS=rows, BLOCK=block, num_warps=4
    )
    return grad_x, grad_gate


def _gated_tile(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return max(1, GATED_TILE // block), block
