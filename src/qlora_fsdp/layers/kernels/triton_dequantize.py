"""Triton kernels that undo 4-bit quantization in one pass, to the compute dtype or to fp8 with a scale a row.

bitsandbytes' own kernels take two passes (scales, then weights) at about half the memory's speed; products are the
same to the last bit but where a scale rounds the other way. Imported on GPUs only.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.quantized_format import Format, code_book, dynamic_map


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    nested,
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
    BLOCKSIZE: tl.constexpr,
    NESTED: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A tile of ROWS x BLOCKS blocks.

    `factors` multiply the values: one a row (FACTOR "row"), or one a block of columns, and the tile is then stored
    transposed (FACTOR "column").
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_row, is_block = rows < num_rows, blocks < num_blocks
    is_both = is_row[:, None] & is_block[None, :]
    if NESTED:
        code = tl.load(scales + rows[:, None] * scale_stride + blocks[None, :], mask=is_both, other=0).to(tl.int32)
        flat = rows[:, None] * num_blocks + blocks[None, :]
        absmax = tl.load(scale_book + code) * tl.load(nested + flat // 256, mask=is_both, other=0.0)
        absmax += tl.load(nested + num_groups)
    else:
        absmax = tl.load(scales + rows[:, None] * scale_stride + blocks[None, :], mask=is_both, other=0.0)
    if FACTOR == "row":
        absmax *= tl.load(factors + rows, mask=is_row, other=0.0)[:, None]
    if FACTOR == "column":
        absmax *= tl.load(factors + blocks, mask=is_block, other=0.0)[None, :]
    half: tl.constexpr = BLOCKSIZE // 2
    offsets = rows[:, None, None] * code_stride + blocks[None, :, None] * half + tl.arange(0, half)[None, None, :]
    code = tl.load(codes + offsets, mask=is_both[:, :, None], other=0).to(tl.int32)
    values = tl.join(tl.load(book + (code >> 4)), tl.load(book + (code & 15))) * absmax[:, :, None, None]
    values = tl.reshape(values, [ROWS, BLOCKS * BLOCKSIZE]).to(out.dtype.element_ty)
    columns = tl.program_id(1) * BLOCKS * BLOCKSIZE + tl.arange(0, BLOCKS * BLOCKSIZE)
    is_column = columns < num_blocks * BLOCKSIZE
    if FACTOR == "column":
        targets = out + columns[:, None].to(tl.int64) * out_stride + rows[None, :]
        tl.store(targets, tl.trans(values), mask=is_column[:, None] & is_row[None, :])
    else:
        targets = out + rows[:, None] * out_stride + columns[None, :]
        tl.store(targets, values, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _quantize_rows_kernel(x, out, scales, num_columns, x_stride, BLOCK: tl.constexpr):
    """One row: its largest magnitude, then its values over that."""
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


def dequantize(format: Format, codes: Tensor, scales: Tensor, nested: Tensor | None, out: Tensor) -> Tensor:
    """Fill `out` [out_features, in_features] (rows may be strided) with the weight; 4-bit formats.

    Args:
        format: of the parts.
        codes: `storage` [out_features, units].
        scales: as `Format.parts` says, quantized if there is `nested`.
        nested: the second quantization's scales, or None.
        out: where to, in the dtype wanted.
    """
    return _launch(format, codes, scales, nested, None, None, out, out.shape, out.stride(0))


def dequantize_fp8(
    format: Format, codes: Tensor, scales: Tensor, nested: Tensor | None, factors: Tensor, out: Tensor, axis: str
) -> Tensor:
    """Fill `out` with fp8 values of the weight times `factors`.

    Args:
        format: of the parts; 4-bit.
        codes: `storage` [out_features, units].
        scales: as `Format.parts` says, quantized if there is `nested`.
        nested: the second quantization's scales, or None.
        factors: float32 [out_features] for axis "row"; [blocks] for axis "column".
        out: float8_e4m3fn [out_features, in_features] for axis "row"; [in_features, out_features] for "column". Rows
            may be strided.
        axis: what a factor is of.
    """
    shape = out.shape if axis == "row" else out.shape[::-1]
    return _launch(format, codes, scales, nested, factors, axis, out, shape, out.stride(0))


def _launch(
    format: Format,
    codes: Tensor,
    scales: Tensor,
    nested: Tensor | None,
    factors: Tensor | None,
    axis: str | None,
    out: Tensor,
    shape: torch.Size,
    out_stride: int,
) -> Tensor:
    num_rows, num_blocks = shape[0], shape[1] // format.blocksize
    assert NESTED_BLOCKSIZE == 256
    code_bytes = codes.view(torch.uint8)
    scale_units = scales if nested is None else scales.view(torch.uint8)
    rows = 64 if axis == "column" else 4
    blocks = max(1, (64 if axis == "column" else 1024) // format.blocksize)
    book = code_book(format.quant_type, codes.device)
    _dequantize_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_blocks, blocks))](
        code_bytes,
        scale_units,
        book if nested is None else nested,
        book,
        dynamic_map(codes.device),
        book if factors is None else factors,
        out,
        num_rows,
        num_blocks,
        0 if nested is None else nested.shape[0] - 1,
        code_bytes.stride(0),
        scale_units.stride(0),
        out_stride,
        BLOCKSIZE=format.blocksize,
        NESTED=nested is not None,
        FACTOR=axis or "",
        ROWS=rows,
        BLOCKS=blocks,
        num_warps=4,
    )
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] in fp8, each row over its own scale.

    Args:
        x: bfloat16 or float32; rows may be strided.

    Returns:
        float8_e4m3fn [N, K] and float32 [N, 1], whose product is x.
    """
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(x.shape[1]))
    _quantize_rows_kernel[(x.shape[0],)](x, out, scales, x.shape[1], x.stride(0), BLOCK=block, num_warps=8)
    return out, scales
