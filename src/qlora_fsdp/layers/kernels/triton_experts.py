"""Triton kernels that move and activate the rows of experts (layers/expert_rows.py). Imported on GPUs only.

Each passes over the memory once. Shapes: T tokens, K experts per token, S = T K rows, H hidden size, I inner size.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from qlora_fsdp.layers.kernels.triton_gate import _activate

MAX_BLOCK = 2048  # columns that a program holds at a time


@triton.jit
def _gather_kernel(x, token, out, width, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = x + tl.load(token + row).to(tl.int64) * x_stride
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < width)
        tl.store(out + row * out_stride + columns, values, mask=columns < width)


@triton.jit
def _combine_kernel(x, position, out, width, x_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for k in range(K):
            row = tl.load(position + token * K + k).to(tl.int64)
            total += tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _activate_kernel(y, weight, out, width, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(y + row * 2 * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        up = tl.load(y + row * 2 * width + width + columns, mask=columns < width, other=0.0).to(tl.float32)
        value, _slope = _activate(gate, ACTIVATION)
        tl.store(out + row * out_stride + columns, (value * up * w).to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _activate_backward_kernel(
    y, weight, grad, out, act, grad_weight, width, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < width
        gate = tl.load(y + row * 2 * width + columns, mask=is_column, other=0.0).to(tl.float32)
        up = tl.load(y + row * 2 * width + width + columns, mask=is_column, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + columns, mask=is_column, other=0.0).to(tl.float32)
        value, slope = _activate(gate, ACTIVATION)
        total += g * value * up
        tl.store(act + row * width + columns, (value * up * w).to(act.dtype.element_ty), mask=is_column)
        target = out + row * out_stride + columns
        tl.store(target, (g * w * up * slope).to(out.dtype.element_ty), mask=is_column)
        tl.store(target + width, (g * w * value).to(out.dtype.element_ty), mask=is_column)
    tl.store(grad_weight + row, tl.sum(total, 0))


def gather(x_TH: Tensor, token_S: Tensor, out: Tensor) -> None:
    """out[s] = x[token[s]]; `out` [S, H] may have strided rows."""
    width = x_TH.shape[1]
    _gather_kernel[(len(token_S),)](
        x_TH, token_S, out, width, x_TH.stride(0), out.stride(0), BLOCK=_block(width), num_warps=4
    )


def combine(x_SH: Tensor, position_TK: Tensor) -> Tensor:
    """y[t] = sum over k of x[position[t, k]], added in float32: [T, H] in the dtype of x."""
    (num_tokens, k), width = position_TK.shape, x_SH.shape[1]
    out = x_SH.new_empty(num_tokens, width)
    _combine_kernel[(num_tokens,)](x_SH, position_TK, out, width, x_SH.stride(0), K=k, BLOCK=_block(width), num_warps=4)
    return out


def activate(y_SU: Tensor, w_S: Tensor, activation: str, out: Tensor) -> None:
    """out = w act(first half of y) (second half of y); `out` [S, I] may have strided rows."""
    num_rows, width = y_SU.shape[0], y_SU.shape[1] // 2
    _activate_kernel[(num_rows,)](
        y_SU, w_S, out, width, out.stride(0), ACTIVATION=activation, BLOCK=_block(width), num_warps=4
    )


def activate_backward(
    y_SU: Tensor, w_S: Tensor, grad_SI: Tensor, activation: str, out: Tensor
) -> tuple[Tensor, Tensor]:
    """The backward pass of `activate`.

    Args:
        y_SU: the input.
        w_S: the routing weights.
        grad_SI: the gradient of the output; contiguous.
        activation: "silu" or "gelu_tanh".
        out: [S, U], whose rows may be strided; filled with the gradient of y.

    Returns:
        The output of `activate` [S, I], and the gradient of w, float32 [S].
    """
    num_rows, width = grad_SI.shape
    act, grad_w = torch.empty_like(grad_SI), torch.empty(num_rows, dtype=torch.float32, device=y_SU.device)
    _activate_backward_kernel[(num_rows,)](
        y_SU,
        w_S,
        grad_SI,
        out,
        act,
        grad_w,
        width,
        out.stride(0),
        ACTIVATION=activation,
        BLOCK=_block(width),
        num_warps=4,
    )
    return act, grad_w


def _block(width: int) -> int:
    block: int = min(MAX_BLOCK, triton.next_power_of_2(width))
    return block
