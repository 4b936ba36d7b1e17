"""Triton kernels that undo quantization in one pass, and that quantize rows to fp8. Imported on GPUs only.

bitsandbytes' own kernels take three passes, two for the scales and one for the weights, at about half the memory's
speed. The results are the same bits: with double quantization a scale is a product and a sum, each rounded, and not one
operation that rounds once (`enable_fp_fusion=False`).
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.kernels.launch import kernel, tl, triton


@triton.jit
def _from_fp8(code):
    """What the bytes of float8_e4m3fn stand for, in float32.

    Their bits, moved to those of float16, are the same number over 2**8, also where it is subnormal. So GPUs without
    8-bit floats can read them too. The code that stands for NaN is no weight's, and no scale's.
    """
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@kernel
@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    nested,
    global_scales,
    book,
    scale_book,
    factors,
    out,
    num_rows,
    num_blocks,
    num_groups,
    code_stride,
    scale_stride,
    out_stride,
    group_rows,
    group_stride,
    source_rows,
    first_row,
    row_blocks,
    first_block,
    BLOCKSIZE: tl.constexpr,
    NESTED: tl.constexpr,
    GLOBAL: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Dequantize a tile of ROWS x BLOCKS blocks.

    `factors` multiply the values: one factor per row (FACTOR "row"), or one per block of columns (FACTOR "column"), in
    which case the tile is stored transposed. With FACTOR "" there are none. Rows are stored in groups of `group_rows`,
    whose distance is `group_stride`. In the weight groups are `source_rows` apart, and of each the rows from
    `first_row` on are taken, and of these the blocks from `first_block` on, out of `row_blocks`.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_row, is_block = rows < num_rows, blocks < num_blocks
    is_both = is_row[:, None] & is_block[None, :]
    group, row = rows // group_rows, rows % group_rows
    source, source_block = group * source_rows + first_row + row, first_block + blocks
    scale = scales + source[:, None] * scale_stride + source_block[None, :]
    if NESTED:
        code = tl.load(scale, mask=is_both, other=0).to(tl.int32)
        flat = source[:, None] * row_blocks + source_block[None, :]
        absmax = tl.load(scale_book + code) * tl.load(nested + flat // 256, mask=is_both, other=0.0)
        absmax += tl.load(nested + num_groups)
    elif GLOBAL:
        absmax = _from_fp8(tl.load(scale, mask=is_both, other=0).to(tl.uint16))
        whole = tl.load(global_scales + source, mask=is_row, other=1.0)
        absmax = tl.div_rn(absmax, tl.broadcast_to(whole[:, None], absmax.shape))
    else:
        absmax = tl.load(scale, mask=is_both, other=0.0).to(tl.float32)
    if FACTOR == "row":
        absmax *= tl.load(factors + rows, mask=is_row, other=0.0)[:, None]
    if FACTOR == "column":
        absmax *= tl.load(factors + blocks, mask=is_block, other=0.0)[None, :]
    half: tl.constexpr = BLOCKSIZE // 2
    starts = source[:, None] * code_stride + source_block[None, :] * half
    offsets = starts[:, :, None] + tl.arange(0, half)[None, None, :]
    code = tl.load(codes + offsets, mask=is_both[:, :, None], other=0).to(tl.int32)
    values = tl.join(tl.load(book + (code >> 4)), tl.load(book + (code & 15))) * absmax[:, :, None, None]
    values = tl.reshape(values, [ROWS, BLOCKS * BLOCKSIZE]).to(out.dtype.element_ty)
    columns = tl.program_id(1) * BLOCKS * BLOCKSIZE + tl.arange(0, BLOCKS * BLOCKSIZE)
    is_column = columns < num_blocks * BLOCKSIZE
    if FACTOR == "column":
        targets = out + columns[:, None].to(tl.int64) * out_stride + rows[None, :]
        tl.store(targets, tl.trans(values), mask=is_column[:, None] & is_row[None, :])
    else:
        offsets_of_rows = group * group_stride + row * out_stride
        tl.store(out + offsets_of_rows[:, None] + columns[None, :], values, mask=is_row[:, None] & is_column[None, :])


@kernel
@triton.jit
def _dequantize_fp8_kernel(
    codes,
    scales,
    out,
    num_rows,
    num_columns,
    code_group_stride,
    code_stride,
    scale_group_stride,
    out_group_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Dequantize a tile of ROWS x COLUMNS codes of one matrix."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(2).to(tl.int64)
    is_row = rows < num_rows
    is_there = is_row[:, None] & (columns < num_columns)[None, :]
    places = group * code_group_stride + rows[:, None] * code_stride + columns[None, :]
    values = _from_fp8(tl.load(codes + places, mask=is_there, other=0).to(tl.uint16))
    scale = tl.load(scales + group * scale_group_stride + rows, mask=is_row, other=0.0)
    values = (values * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + group * out_group_stride + rows[:, None] * out_stride + columns[None, :], values, mask=is_there)


@kernel
@triton.jit
def _dequantize_scales_kernel(codes, nested, book, out, num_scales, num_groups, BLOCK: tl.constexpr):
    """Dequantize BLOCK scales of a double quantization."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < num_scales
    code = tl.load(codes + place, mask=is_there, other=0).to(tl.int32)
    absmax = tl.load(book + code) * tl.load(nested + place // 256, mask=is_there, other=0.0)
    tl.store(out + place, absmax + tl.load(nested + num_groups), mask=is_there)


@kernel
@triton.jit
def _quantize_rows_kernel(x, out, scales, num_columns, x_stride, BLOCK: tl.constexpr):
    """Quantize one row: find its largest magnitude, and divide its values by that over 448, the largest fp8 value."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        values = tl.load(x + row * x_stride + start + columns, mask=start + columns < num_columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    for start in range(0, num_columns, BLOCK):
        is_column = start + columns < num_columns
        values = tl.load(x + row * x_stride + start + columns, mask=is_column, other=0.0).to(tl.float32) / scale
        tl.store(out + row * num_columns + start + columns, values.to(out.dtype.element_ty), mask=is_column)


# Many arguments, because this folder takes plain tensors and knows no class of a quantized weight.
def dequantize(
    codes: Tensor,
    scales: Tensor,
    nested: Tensor | None,
    books: tuple[Tensor, Tensor],
    blocksize: int,
    out: Tensor,
    factors: Tensor | None = None,
    axis: Literal["", "row", "column"] = "",
    origin: tuple[int, int] = (0, 0),
    global_scales: Tensor | None = None,
) -> Tensor:
    """Fill `out` with a part of a 4-bit weight, or with its rows times `factors`. Returns `out`.

    Args:
        codes: the whole weight's: two codes per byte, in any dtype [rows, units].
        scales: float32 or a dtype of 16 bits [rows, blocks]; or float8_e4m3fn, if there are `global_scales`; or
            quantized to bytes, in any dtype, if there is `nested`.
        nested: scales of the second quantization and its mean, float32 [groups + 1]; None without double quantization.
        books: the values of codes, float32 [16], and of quantized scales, float32 [256].
        blocksize: consecutive weights of a row that share a scale.
        out: in the dtype wanted, [rows, columns], or for axis "column" transposed, or [groups, rows of a group,
            columns], where the weight is this many matrices one below the other. Rows and groups may be strided.
        factors: float32 [rows] for axis "row", [blocks] for axis "column"; None for axis "".
        axis: what there is one factor for.
        origin: the row, of each group, and the column that come first in `out`; the column a multiple of `blocksize`.
        global_scales: by what the scales of each row are divided, float32 [rows]; None: by nothing.
    """
    assert NESTED_BLOCKSIZE == 256
    book, scale_book = books
    first_row, first_column = origin
    num_rows, num_columns = out.shape[::-1] if axis == "column" else (out.shape[:-1].numel(), out.shape[-1])
    num_blocks = num_columns // blocksize
    code_bytes = codes.view(torch.uint8)
    is_in_bytes = nested is not None or global_scales is not None
    scale_units = scales.view(torch.uint8) if is_in_bytes else scales
    rows = 64 if axis == "column" else 4
    blocks = max(1, (64 if axis == "column" else 1024) // blocksize)
    _dequantize_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_blocks, blocks))](
        code_bytes,
        scale_units,
        book if nested is None else nested,
        book if global_scales is None else global_scales,
        book,
        scale_book,
        book if factors is None else factors,
        out,
        num_rows,
        num_blocks,
        0 if nested is None else nested.shape[0] - 1,
        code_bytes.stride(0),
        scale_units.stride(0),
        out.stride(-2),
        out.shape[-2] if out.ndim == 3 else num_rows,
        out.stride(0) if out.ndim == 3 else 0,
        codes.shape[0] // out.shape[0] if out.ndim == 3 else 0,
        first_row,
        2 * code_bytes.shape[1] // blocksize,
        first_column // blocksize,
        BLOCKSIZE=blocksize,
        NESTED=nested is not None,
        GLOBAL=global_scales is not None,
        FACTOR=axis,
        ROWS=rows,
        BLOCKS=blocks,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def dequantize_fp8(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with what codes in fp8 stand for. Returns `out`.

    Args:
        codes: the bytes of float8_e4m3fn, uint8 [groups, rows, columns]; groups and rows may be strided.
        scales: float32 [groups, rows]; groups may be strided.
        out: in the dtype wanted [groups, rows, columns]; groups and rows may be strided.
    """
    num_groups, num_rows, num_columns = out.shape
    rows, columns = 4, 1024
    _dequantize_fp8_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns), num_groups)](
        codes,
        scales,
        out,
        num_rows,
        num_columns,
        codes.stride(0),
        codes.stride(1),
        scales.stride(0),
        out.stride(0),
        out.stride(1),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


def dequantize_scales(codes: Tensor, nested: Tensor, book: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with the scales of a double quantization, the bits that bitsandbytes' two kernels give. Returns `out`.

    Args:
        codes: uint8 [rows, blocks], contiguous.
        nested: float32 [groups + 1]: the absmax of each 256 scales in row-major order, and last what is added to all.
        book: the values of the codes, float32 [256].
        out: float32 [rows, blocks], contiguous.
    """
    assert NESTED_BLOCKSIZE == 256
    block = 1024
    _dequantize_scales_kernel[(triton.cdiv(codes.numel(), block),)](
        codes, nested, book, out, codes.numel(), nested.shape[0] - 1, BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [N, K] to fp8, with a scale per row.

    Args:
        x: bfloat16 or float32; rows may be strided.

    Returns:
        float8_e4m3fn [N, K] and float32 [N, 1], whose product is about x.
    """
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(x.shape[1]))
    _quantize_rows_kernel[(x.shape[0],)](x, out, scales, x.shape[1], x.stride(0), BLOCK=block, num_warps=8)
    return out, scales
