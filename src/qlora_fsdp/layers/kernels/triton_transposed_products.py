"""A Triton kernel that multiplies few rows with quantized experts y = x W, as gpt-oss and Llama 4 store them.

There a weight has a row for each input, and a block of codes with one scale lies along the outputs. So a program
computes the outputs of one block. The scale of a block is another one for each input, over which the sum runs: it
multiplies the input, not the sum, and the product is rounded to 16 bits as a dequantized weight would be. Codes are
looked up as in triton_products.py: upper nibbles are the even outputs, lower ones the odd outputs.

A program needs one scale of each input, and those lie a row of scales apart: a byte each, of which a GPU reads 32. And
a quantized scale has to be there before its value can be looked up. So another kernel stores the scales of all experts
that have rows in float32 first, those of a block side by side. Imported on GPUs only.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.kernels.launch import kernel, tl, triton
from qlora_fsdp.layers.kernels.triton_products import (
    MAX_EXPERT_ROWS,
    WeightCodes,
    _values,
    best_factor,
    lookup,
    scaled,
)

MAX_OUTPUTS = 64  # of a program, and columns of a block or of a part of it
INPUTS = 64  # that are summed up at a time


class TransposedTile(NamedTuple):
    """How the work of one product is divided.

    Attributes:
        rows: of x, of a program at a time.
        num_warps: of a program.
        num_stages: steps whose codes are in shared memory at a time.
    """

    rows: int
    num_warps: int
    num_stages: int


def transposed_tile(width: int, rows: int, num_experts: int, is_4bit: bool) -> TransposedTile | None:
    """The tile for products of experts; None if the weight is dequantized.

    They were measured on an H200 for both weights of gpt-oss-20b, with 4 to 1,024 rows (`show.py products`).

    Args:
        width: inputs, which are the rows of a weight.
        rows: of x, of all experts.
        num_experts: of a layer.
        is_4bit: or int8, which no kernel multiplies so.
    """
    if not is_4bit or width % INPUTS or rows > MAX_EXPERT_ROWS * num_experts:
        return None
    if rows <= 8 * num_experts:
        return TransposedTile(16, 2, 4)
    if rows <= 16 * num_experts:
        return TransposedTile(32, 1, 3)
    return TransposedTile(64, 4, 3)


@kernel
@triton.jit(do_not_specialize=["scale_stride", "num_groups"])
def _input_scales_kernel(
    scales, nested, scale_book, ends, out, width, row_blocks, scale_stride, num_groups,
    NESTED: tl.constexpr, BLOCKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """One program stores the scales of some inputs of one expert, if it has rows, as out [blocks, experts' inputs]."""
    expert = tl.program_id(1)
    first_row = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) > first_row:
        lines = expert.to(tl.int64) * width + tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)
        blocks = tl.arange(0, BLOCKS)
        is_block = (blocks < row_blocks)[None, :]
        places = lines[:, None] * scale_stride + blocks[None, :]
        if NESTED:
            number = tl.load(scales + places, mask=is_block, other=0).to(tl.int32)
            flat = lines[:, None] * row_blocks + blocks[None, :]
            group = tl.load(nested + flat // 256, mask=is_block, other=0.0)
            scale = tl.load(scale_book + number) * group + tl.load(nested + num_groups)
        else:
            scale = tl.load(scales + places, mask=is_block, other=0.0)
        num_lines = width * tl.num_programs(1)
        out_places = out + blocks[:, None].to(tl.int64) * num_lines + lines[None, :]
        tl.store(out_places, tl.trans(scale), mask=tl.trans(is_block))


@kernel
@triton.jit
def _transposed_kernel(
    x, codes, scales, bias, b, out, h, book, ends, width, num_outputs, code_stride, rank, factor,
    BLOCKSIZE: tl.constexpr, LOOKUP: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program computes some outputs of all rows of one expert, ROWS at a time. Scales are [blocks, all inputs]."""
    dtype = x.dtype.element_ty
    half: tl.constexpr = OUTPUTS // 2
    part = tl.program_id(0)
    expert = tl.program_id(1)
    row = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    first_input = expert.to(tl.int64) * width
    block = (part * OUTPUTS // BLOCKSIZE).to(tl.int64)
    block_scales = scales + block * width * tl.num_programs(1) + first_input
    outputs = part * OUTPUTS + tl.arange(0, OUTPUTS)
    in_part = part * half + tl.arange(0, half)
    inputs = tl.arange(0, INPUTS)
    while row < end:
        rows = row + tl.arange(0, ROWS)
        is_row = rows < end
        x_places = x + rows.to(tl.int64)[:, None] * width + inputs[None, :]
        even = tl.zeros([ROWS, half], tl.float32)
        odd = tl.zeros([ROWS, half], tl.float32)
        for start in tl.range(0, width, INPUTS):
            line = first_input + start + inputs
            code = tl.load(codes + line[:, None] * code_stride + in_part[None, :])
            values = tl.load(x_places + start, mask=is_row[:, None], other=0.0)
            scale = tl.load(block_scales + start + inputs)
            values = (values.to(tl.float32) * scale[None, :]).to(dtype)
            upper, lower = _values(code, book, LOOKUP, dtype)
            even = tl.dot(values, upper, even)
            odd = tl.dot(values, lower, odd)
        total = tl.interleave(even, odd) * factor
        if BIAS:
            total += tl.load(bias + expert.to(tl.int64) * num_outputs + outputs).to(tl.float32)[None, :]
        if RANK > 0:
            b_of_expert = b + expert.to(tl.int64) * num_outputs * rank
            for start in range(0, rank, RANK):
                ranks = start + tl.arange(0, RANK)
                is_rank = ranks < rank
                b_tile = tl.load(
                    b_of_expert + outputs[None, :] * rank + ranks[:, None], mask=is_rank[:, None], other=0.0
                )
                h_tile = tl.load(
                    h + rows.to(tl.int64)[:, None] * rank + ranks[None, :],
                    mask=is_row[:, None] & is_rank[None, :],
                    other=0.0,
                )
                total = tl.dot(h_tile, b_tile, total)
        places = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None])
        row += ROWS


def transposed_products(
    x_SI: Tensor,
    weight: WeightCodes,
    values: tuple[float, ...],
    books: tuple[Tensor, Tensor],
    blocksize: int,
    tile: TransposedTile,
    ends: Tensor,
    h_SR: Tensor | None = None,
    b_EOR: Tensor | None = None,
    interprets: bool = False,
) -> Tensor:
    """x W + bias + h B^T of each row's expert, [S, O].

    Args:
        x_SI: bfloat16 or float16, contiguous; rows are sorted by expert.
        weight: W [E, I, O] of all experts, quantized along O, one below another; bias [E, O] or None.
        values: of the 16 codes.
        books: as of `triton_products.products`.
        blocksize: outputs that share a scale.
        tile: divides the work.
        ends: int32 [E], one past each expert's last row.
        h_SR: x A^T of each row's expert, in the dtype of x.
        b_EOR: B of each expert, in the dtype of x.
        interprets: whether Triton's interpreter runs the kernel.
    """
    assert NESTED_BLOCKSIZE == 256
    num_rows, width = x_SI.shape
    num_outputs = 2 * weight.codes.shape[1]
    outputs = min(MAX_OUTPUTS, blocksize)
    row_blocks = num_outputs // blocksize
    y_SO = x_SI.new_empty(num_rows, num_outputs)
    scales = x_SI.new_empty(row_blocks, len(weight.codes), dtype=torch.float32)
    _input_scales_kernel[(width // INPUTS, len(ends))](
        weight.scales,
        books[1] if weight.nested is None else weight.nested,
        books[1],
        ends,
        scales,
        width,
        row_blocks,
        weight.scales.stride(0),
        0 if weight.nested is None else len(weight.nested) - 1,
        NESTED=weight.nested is not None,
        BLOCKS=triton.next_power_of_2(row_blocks),
        INPUTS=INPUTS,
        num_warps=4,
    )
    _transposed_kernel[(num_outputs // outputs, len(ends))](
        x_SI,
        weight.codes,
        scales,
        x_SI if weight.bias is None else weight.bias,
        x_SI if b_EOR is None else b_EOR,
        y_SO,
        x_SI if h_SR is None else h_SR,
        books[0],
        ends,
        width,
        num_outputs,
        weight.codes.stride(0),
        0 if h_SR is None else h_SR.shape[1],
        1 / best_factor(values, x_SI.dtype),
        BLOCKSIZE=blocksize,
        LOOKUP="" if interprets else lookup(scaled(values, x_SI.dtype), x_SI.dtype),
        BIAS=weight.bias is not None,
        RANK=0 if h_SR is None else 16,
        OUTPUTS=outputs,
        INPUTS=INPUTS,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y_SO
