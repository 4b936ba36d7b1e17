"""Triton kernels of RMSNorm (arXiv:1910.07467) with a residual beside it (layers/norm.py). Imported on GPUs only."""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton


@kernel
@triton.jit
def _norm_forward_kernel(x, weight, y, scales, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    values = tl.load(x + row * width + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(scales + row, scale)
    normed = (values * scale).to(y.dtype.element_ty)  # rounded before the weight, as transformers does
    factors = tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(y + row * width + columns, normed * factors, mask=is_column)


@kernel
@triton.jit
def _norm_backward_kernel(x, weight, scales, grad_y, grad_residual, grad_x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    places = row * width + columns
    scale = tl.load(scales + row)
    normed = tl.load(x + places, mask=is_column, other=0.0).to(tl.float32) * scale
    grad = tl.load(grad_y + places, mask=is_column, other=0.0).to(tl.float32)
    grad *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    residual = tl.load(grad_residual + places, mask=is_column, other=0.0).to(tl.float32)
    total = scale * (grad - normed * (tl.sum(grad * normed, 0) / width)) + residual
    tl.store(grad_x + places, total.to(grad_x.dtype.element_ty), mask=is_column)


def forward(x_ND: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, times the weight; and one over the root mean square, float32 [N]."""
    num_rows, width = x_ND.shape
    y, scales = torch.empty_like(x_ND), torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    _norm_forward_kernel[(num_rows,)](x_ND, weight, y, scales, width, eps, **_blocks(width))
    return y, scales


def backward(x_ND: Tensor, weight: Tensor, scales: Tensor, grad_y: Tensor, grad_residual: Tensor) -> Tensor:
    """The gradient of x through the norm plus its gradient through the residual; all are [N, D] and contiguous."""
    num_rows, width = x_ND.shape
    grad_x = torch.empty_like(x_ND)
    _norm_backward_kernel[(num_rows,)](x_ND, weight, scales, grad_y, grad_residual, grad_x, width, **_blocks(width))
    return grad_x


def _blocks(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}
