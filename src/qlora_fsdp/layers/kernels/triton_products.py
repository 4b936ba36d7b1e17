"""A Triton kernel that multiplies few rows with quantized weights as they are stored. Imported on GPUs only.

A step of generation has a row for each text. Dequantizing a weight for it writes four times as many bytes as the codes
have, and reads them again. Here codes are looked up in registers, right before the tensor cores need them.

**How 16 values are looked up without memory.** A code stands for one of 16 values of 2 bytes. The instruction `prmt`
makes a word of any four of the eight bytes in two registers, and takes its four choices from the low three bits of four
nibbles: it is a table of eight bytes, read four times at once, and the nibbles that choose can be the codes themselves.
Two such instructions look up four codes in the lower and in the upper half of a table of 16 bytes, and `lop3` takes the
right half of each, by a mask that another `prmt` has made of the codes' highest bits (it repeats the sign of a byte if
the fourth bit of the choice is set). One table has the values' upper bytes, one their lower ones. Last, `prmt` puts
upper and lower bytes side by side. That is 22 instructions for the eight codes of a register, and none of them waits.

**Even and odd columns are two products.** A byte holds the codes of columns 2i and 2i + 1. Values of the upper nibbles
are multiplied with the even columns of x, those of the lower ones with the odd columns, so that nothing has to be put
in order. `split_even_odd` stores x so, once for all layers that share it.

**Scales multiply sums.** The scale of a block is the same for all columns that are summed up, so it multiplies the sum,
in float32. The values are multiplied by a constant first, with which they lose least where they are rounded to 16 bits
(`best_factor`), and the result is divided by it: what is multiplied is nearer to the exact weight than a dequantized
one, whose every value is rounded.

**Sums are split** (several programs for one tile of the output) where there are too few tiles to keep a GPU busy. Each
program stores what it has summed, and counts itself. The last one adds up all, in their order, so that the result does
not depend on which one is last; it adds bias and adapter, and rounds once.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MAX_WEIGHTS = 3  # that share an input, and are multiplied in one launch
INT8_FACTOR = 127.0  # a row's largest magnitude stands for this code
# Rows up to which a product takes no longer than a dequantized weight's: 256 rows of a 70B model's q, k and v take 196
# microseconds, and 174 with the dequantized weight, if the scales are quantized too. (benchmarks/products.py, one H100)
MAX_ROWS = 256
MAX_NESTED_ROWS = 128
MAX_SPLIT = 4
# Outputs from which more rows than that are multiplied with codes too, all in one tile, so that codes are looked up
# once: 256 rows of 28,672 x 4,096 take 158 microseconds of an H200, and 221 with the dequantized weight. A weight of
# 6,144 outputs takes 57 and 54: its programs keep a third of the GPU busy.
MANY_ROWS_OUTPUTS = 12_288
MAX_EXPERT_ROWS = 32  # of an expert, on average: up to which products of experts were measured


class Tile(NamedTuple):
    """How the work of one product is divided.

    Attributes:
        outputs: of a program; rows of the weight.
        rows: of x, of a program.
        step: blocks that a program multiplies before it asks for the next ones.
        split: programs that share the sum over columns of one tile.
        num_warps: of a program.
        num_stages: steps whose codes are in shared memory at a time.
        scales_weight: multiply the weight with its scales, rounded to 16 bits, in place of the sums of each block.
    """

    outputs: int
    rows: int
    step: int
    split: int
    num_warps: int
    num_stages: int
    scales_weight: bool = False


class WeightCodes(NamedTuple):
    """A quantized weight W [O, I] as the kernel reads it.

    Attributes:
        codes: uint8 [O, I / 2], two codes a byte, or int8 [O, I]. Rows may be strided.
        scales: float32, or 16 bits of int4 and mxfp4 [O, blocks], or uint8 with `nested`, or float32 [O] for int8.
            Rows may be strided.
        nested: float32 [groups + 1], the scales of the second quantization, and what is added to all; or None.
        bias: [O] in the dtype of x, or None.
    """

    codes: Tensor
    scales: Tensor
    nested: Tensor | None = None
    bias: Tensor | None = None


def best_tile(
    outputs: int, width: int, rows: int, blocksize: int, is_4bit: bool, num_multiprocessors: int
) -> Tile | None:
    """The tile for a product, by what benchmarks/products.py has measured on an H100.

    For each of its weights and numbers of rows, no tile of those that it tries takes more than a sixth less time.

    Args:
        outputs: of all weights that share the input.
        width: columns of a weight.
        rows: of x.
        blocksize: columns that share a scale; of 4-bit codes.
        is_4bit: or int8.
        num_multiprocessors: of the GPU.

    Returns:
        None if the width can't be divided.
    """
    sub = _columns(blocksize, is_4bit)
    if width % sub:
        return None
    tile_rows = min(128, max(16, triton.next_power_of_2(rows)))
    tile_outputs = 32 if tile_rows == 16 else 64
    step = 2
    if is_4bit and tile_rows == 32:
        step = 1
    elif is_4bit and tile_rows <= 64:
        step = 4  # whose quantized scales are one word
    while width % (sub * step):
        step //= 2
    num_stages = {4: 3, 2: 3, 1: 5}[step]
    if step == 2 and tile_rows == 16:
        num_stages = 4
    # Programs for each multiprocessor with which it is busy: as many as have room there.
    wanted = {16: 6, 32: 6, 64: 4, 128: 2}[tile_rows] * num_multiprocessors
    num_programs = triton.cdiv(outputs, tile_outputs) * triton.cdiv(rows, tile_rows)
    num_steps = width // (sub * step)
    split = max(1, min(MAX_SPLIT, wanted // num_programs, num_steps // 2))
    return Tile(tile_outputs, tile_rows, step, split, tile_outputs // 16, num_stages)


def many_rows_tile(outputs: int, width: int, blocksize: int) -> Tile | None:
    """The tile for more than MAX_NESTED_ROWS rows of 4-bit codes on Hopper; None if something else is faster.

    The weight is multiplied with its scales, as registers for the sums of each block are missing. That rounds it twice,
    to 2.8e-3 of the norm of the result, where a dequantized weight's is 2.3e-3 away.

    Args:
        outputs: of all weights that share the input.
        width: columns of a weight.
        blocksize: columns that share a scale.
    """
    if outputs < MANY_ROWS_OUTPUTS or width % _columns(blocksize, True):
        return None
    return Tile(64, 256, 1, 1, 4, 3, scales_weight=True)


def best_expert_tile(width: int, rows: int, num_experts: int, blocksize: int, is_4bit: bool) -> Tile | None:
    """The tile for products of experts, by what benchmarks/products.py has measured on an H100.

    An expert with more rows than a tile has reads its codes again for the next ones. With twice as many rows as experts
    have on average, that is rare.

    Args:
        width: columns of a weight.
        rows: of x, of all experts.
        num_experts: of a layer.
        blocksize: columns that share a scale; of 4-bit codes.
        is_4bit: or int8.

    Returns:
        None if the width can't be divided, or if the weight is better dequantized for so many rows.
    """
    sub = _columns(blocksize, is_4bit)
    if width % sub or rows > MAX_EXPERT_ROWS * num_experts:
        return None
    if rows <= 8 * num_experts:
        has_step = is_4bit and width % (4 * sub) == 0
        return Tile(32, 16, 4, 1, 2, 3) if has_step else Tile(32, 16, 1, 1, 2, 5)
    if rows <= 16 * num_experts:
        return Tile(64, 32, 1, 1, 4, 5)
    return Tile(64, 64, 1, 1, 4, 5)


def max_tiles(outputs: Sequence[int]) -> int:
    """How many tiles of weights' outputs there are, at most, for up to MAX_ROWS rows."""
    return sum(2 * triton.cdiv(num, 64) for num in outputs)


def _columns(blocksize: int, is_4bit: bool) -> int:
    """How many columns a program multiplies at a time."""
    return min(64, blocksize) if is_4bit else 64


@cache
def best_factor(values: tuple[float, ...], dtype: torch.dtype) -> float:
    """The factor from 1 to 2 with which values are rounded to a dtype with the least error."""
    book = torch.tensor(values, dtype=torch.float64)
    factors = torch.linspace(1, 2, 4097, dtype=torch.float64)[:-1, None]
    exact = book * factors
    errors = (exact.to(dtype).double() - exact).norm(dim=1) / factors[:, 0]
    return float(factors[errors.argmin()])


@cache
def lookup(values: tuple[float, ...], dtype: torch.dtype) -> str:
    """Inline PTX that turns four bytes of codes into two times four values: of upper nibbles, and of lower ones.

    Args:
        values: of the 16 codes.
        dtype: bfloat16 or float16.
    """
    book = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.int16).tolist()
    upper_bytes = [(value >> 8) & 255 for value in book]
    lower_bytes = [value & 255 for value in book]
    upper = [int.from_bytes(bytes(upper_bytes[at : at + 4]), "little") for at in range(0, 16, 4)]
    lower = [int.from_bytes(bytes(lower_bytes[at : at + 4]), "little") for at in range(0, 16, 4)]
    tables = [
        f"mov.b32 {name}{at}, 0x{word:08x};"
        for name, words in (("T", upper), ("U", lower))
        for at, word in enumerate(words)
    ]
    # s: the codes' low three bits. m: bytes of ones where a code is 8 or more. 0: of bytes 0 and 1; 1: of 2 and 3.
    found = []
    for half in "01":
        for table, result in (("T", "h"), ("U", "l")):
            found.append(f"prmt.b32 a, {table}0, {table}1, s{half};")
            found.append(f"prmt.b32 b, {table}2, {table}3, s{half};")
            found.append(f"lop3.b32 {result}{half}, a, b, m{half}, 0xD8;")  # m ? b : a
    lines = [
        ".reg .b32 s0, s1, m0, m1, x, a, b, h0, h1, l0, l1, T0, T1, T2, T3, U0, U1, U2, U3;",
        *tables,
        "and.b32 s0, $4, 0x77777777;",
        "shr.u32 s1, s0, 16;",
        "shl.b32 x, $4, 4;",  # lower nibbles' highest bits become signs of bytes
        "prmt.b32 m0, x, $4, 0xD9C8;",
        "prmt.b32 m1, x, $4, 0xFBEA;",
        *found,
        "prmt.b32 $0, l0, h0, 0x7351;",  # a byte's upper nibble was chosen second
        "prmt.b32 $1, l1, h1, 0x7351;",
        "prmt.b32 $2, l0, h0, 0x6240;",
        "prmt.b32 $3, l1, h1, 0x6240;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _values(codes, book, LOOKUP: tl.constexpr, DTYPE: tl.constexpr):
    """The values of upper and of lower nibbles. Triton's interpreter knows no PTX, and reads `book`, float32 [16]."""
    if LOOKUP == "":
        upper = tl.load(book + (codes.to(tl.int32) >> 4)).to(DTYPE)
        lower = tl.load(book + (codes.to(tl.int32) & 15)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        upper, lower = tl.inline_asm_elementwise(
            LOOKUP, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        upper, lower = tl.inline_asm_elementwise(
            LOOKUP, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return upper, lower


@triton.jit
def _sums(
    x, rows, is_row, codes, scales, nested, book, scale_book, outputs, num_groups, width, code_stride, scale_stride,
    block_offset, first, last,
    BLOCKSIZE: tl.constexpr, SUB: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    LOOKUP: tl.constexpr, SCALED: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of a tile [OUTPUTS, ROWS] over the columns of steps from `first` to `last`, without int8's scale."""
    dtype = x.dtype.element_ty
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if KIND == "int8":
        columns = tl.arange(0, SUB)
        code_places = codes + outputs.to(tl.int64)[:, None] * code_stride + columns[None, :]
        x_places = x + rows.to(tl.int64)[None, :] * width + columns[:, None]
        for step in tl.range(first, last):
            for at in tl.static_range(STEP):
                place = (step * STEP + at) * SUB
                code = tl.load(code_places + place)
                factor = tl.load(x_places + place, mask=is_row[None, :], other=0.0)
                total = tl.dot(code.to(dtype), factor, total)
    else:
        half: tl.constexpr = SUB // 2
        columns = tl.arange(0, half)
        code_places = codes + outputs.to(tl.int64)[:, None] * code_stride + columns[None, :]
        even_places = x + rows.to(tl.int64)[None, :] * width + columns[:, None]
        odd_places = even_places + width // 2
        row_blocks = width // BLOCKSIZE
        scale_places = scales + outputs.to(tl.int64) * scale_stride
        flat = outputs.to(tl.int64) * row_blocks + block_offset
        if KIND == "nested":
            mean = tl.load(nested + num_groups)
        for step in tl.range(first, last):
            if KIND == "nested" and WORDS:  # the bytes of a step's blocks are one word
                word = tl.load(scale_places + step)
                group = tl.load(nested + (flat + step * STEP) // 256)
            for at in tl.static_range(STEP):
                sub = step * STEP + at
                code = tl.load(code_places + sub * half)
                even = tl.load(even_places + sub * half, mask=is_row[None, :], other=0.0)
                odd = tl.load(odd_places + sub * half, mask=is_row[None, :], other=0.0)
                block = sub // (BLOCKSIZE // SUB)
                if KIND == "nested":
                    if WORDS:
                        number = (word >> (8 * at)) & 255
                    else:
                        number = tl.load(scale_places + block).to(tl.int32)
                        group = tl.load(nested + (flat + block) // 256)
                    scale = tl.load(scale_book + number) * group + mean
                else:
                    scale = tl.load(scale_places + block)
                upper, lower = _values(code, book, LOOKUP, dtype)
                if SCALED:
                    rounded = scale.to(dtype)[:, None]
                    total = tl.dot(upper * rounded, even, total)
                    total = tl.dot(lower * rounded, odd, total)
                else:
                    part = tl.dot(upper, even)
                    part = tl.dot(lower, odd, part)
                    total += part * scale[:, None]
    return total


@triton.jit
def _finish(
    total, out, bias, h, b, scales, outputs, rows, is_output, is_row, num_outputs, rank, rank_all, scale_stride, factor,
    KIND: tl.constexpr, BIAS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale, add bias and what an adapter adds, and store."""
    if KIND == "int8":
        factor *= tl.load(scales + outputs.to(tl.int64) * scale_stride)[:, None]
    total *= factor
    if BIAS:
        total += tl.load(bias + outputs).to(tl.float32)[:, None]
    if RANK > 0:
        for start in range(0, rank, RANK):
            ranks = start + tl.arange(0, RANK)
            is_rank = ranks < rank
            b_tile = tl.load(b + outputs[:, None] * rank + ranks[None, :], mask=is_rank[None, :], other=0.0)
            h_tile = tl.load(
                h + rows.to(tl.int64)[None, :] * rank_all + ranks[:, None],
                mask=is_rank[:, None] & is_row[None, :],
                other=0.0,
            )
            total = tl.dot(b_tile, h_tile, total)
    places = out + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@kernel
@triton.jit(do_not_specialize=["num_rows", "scale_stride", "num_groups_0", "num_groups_1", "num_groups_2", "split"])
def _products_kernel(
    x, codes_0, codes_1, codes_2, scales_0, scales_1, scales_2, nested_0, nested_1, nested_2,
    bias_0, bias_1, bias_2, b_0, b_1, b_2, out_0, out_1, out_2,
    h, book, scale_book, ends, partials, counts,
    num_rows, width, code_stride, scale_stride, num_outputs_0, num_outputs_1, num_outputs_2,
    num_groups_0, num_groups_1, num_groups_2, rank_0, rank_1, rank_2, rank_all, split, factor,
    BLOCKSIZE: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, LOOKUP: tl.constexpr,
    BIAS: tl.constexpr, RANK: tl.constexpr, WEIGHTS: tl.constexpr, GROUPED: tl.constexpr,
    SUB: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, IS_SPLIT: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program sums up a tile of one weight's product, or a part of it.

    GROUPED: the weight is that of many experts, one below another, and expert e has the rows of x from ends[e - 1] to
    ends[e]. A program computes all rows of its expert, ROWS at a time.
    """
    block = tl.program_id(1)
    part = tl.program_id(2)
    codes, scales, nested, bias, b, out = codes_0, scales_0, nested_0, bias_0, b_0, out_0
    num_outputs, num_groups, rank, low = num_outputs_0, num_groups_0, rank_0, h
    if WEIGHTS > 1:
        end_0 = tl.cdiv(num_outputs_0, OUTPUTS)
        end_1 = end_0 + tl.cdiv(num_outputs_1, OUTPUTS)
        if block >= end_1:
            codes, scales, nested, bias, b, out = codes_2, scales_2, nested_2, bias_2, b_2, out_2
            num_outputs, num_groups, rank, low = num_outputs_2, num_groups_2, rank_2, h + rank_0 + rank_1
            block -= end_1
        elif block >= end_0:
            codes, scales, nested, bias, b, out = codes_1, scales_1, nested_1, bias_1, b_1, out_1
            num_outputs, num_groups, rank, low = num_outputs_1, num_groups_1, rank_1, h + rank_0
            block -= end_0
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    outputs = tl.where(is_output, outputs, 0)
    block_offset = 0
    if GROUPED:
        expert = tl.program_id(0)
        row = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        before = expert.to(tl.int64) * num_outputs
        codes += before * code_stride
        scales += before * scale_stride
        bias += before
        b += before * rank
        block_offset = before * (width // BLOCKSIZE)
    else:
        row = tl.program_id(0) * ROWS
        end = tl.minimum(row + ROWS, num_rows)
    num_steps = width // (SUB * STEP)
    first = part * num_steps // split
    last = (part + 1) * num_steps // split
    while row < end:
        rows = row + tl.arange(0, ROWS)
        is_row = rows < end
        total = _sums(
            x, rows, is_row, codes, scales, nested, book, scale_book, outputs, num_groups, width, code_stride,
            scale_stride, block_offset, first, last,
            BLOCKSIZE, SUB, STEP, KIND, WORDS, LOOKUP, SCALED, OUTPUTS, ROWS,
        )  # fmt: skip
        if IS_SPLIT:
            tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            in_tile = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            places = partials + tile.to(tl.int64) * (split * OUTPUTS * ROWS) + in_tile
            tl.store(places + part * (OUTPUTS * ROWS), total)
            tl.debug_barrier()
            arrived = tl.atomic_add(counts + tile, 1, sem="acq_rel")
            if arrived == split - 1:
                total = tl.zeros([OUTPUTS, ROWS], tl.float32)
                for other in range(split):
                    total += tl.load(places + other * (OUTPUTS * ROWS), cache_modifier=".cg")
                _finish(
                    total, out, bias, low, b, scales, outputs, rows, is_output, is_row, num_outputs, rank, rank_all,
                    scale_stride, factor, KIND, BIAS, RANK, OUTPUTS, ROWS,
                )  # fmt: skip
                tl.store(counts + tile, 0)
        else:
            _finish(
                total, out, bias, low, b, scales, outputs, rows, is_output, is_row, num_outputs, rank, rank_all,
                scale_stride, factor, KIND, BIAS, RANK, OUTPUTS, ROWS,
            )  # fmt: skip
        row += ROWS


@kernel
@triton.jit
def _split_kernel(x, out, width, x_stride, COLUMNS: tl.constexpr):
    """Store the even and the odd columns of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_pair = pairs < width // 2
    both = 2 * pairs[:, None] + tl.arange(0, 2)[None, :]
    values = tl.load(x + row * x_stride + both, mask=is_pair[:, None], other=0.0)
    even, odd = tl.split(values)
    tl.store(out + row * width + pairs, even, mask=is_pair)
    tl.store(out + row * width + width // 2 + pairs, odd, mask=is_pair)


def split_even_odd(x_NI: Tensor) -> Tensor:
    """x with its even columns before its odd ones, as `products` takes it for 4-bit codes."""
    out = torch.empty(x_NI.shape, dtype=x_NI.dtype, device=x_NI.device)
    columns = 1024
    num_rows, width = x_NI.shape
    grid = (num_rows, triton.cdiv(width // 2, columns))
    _split_kernel[grid](x_NI, out, width, x_NI.stride(0), COLUMNS=columns, num_warps=4)
    return out


def products(
    x_NI: Tensor,
    weights: Sequence[WeightCodes],
    values: tuple[float, ...],
    books: tuple[Tensor, Tensor],
    blocksize: int,
    tile: Tile,
    counts: Tensor,
    h_NR: Tensor | None = None,
    b: Sequence[Tensor] = (),
    ends: Tensor | None = None,
    interprets: bool = False,
) -> list[Tensor]:
    """x W^T + bias + h B^T of each weight, [N, O].

    Args:
        x_NI: bfloat16 or float16, contiguous; for 4-bit codes what `split_even_odd` has made.
        weights: at most MAX_WEIGHTS, of one format; with `ends` one, of all experts.
        values: of the 16 codes; () for int8.
        books: the values of the 16 codes, multiplied by `best_factor`, float32, which the interpreter reads; and the
            values of quantized scales, float32 [256].
        blocksize: columns that share a scale; of 4-bit codes.
        tile: divides the work.
        counts: int32 zeros, one at least for each tile of the outputs; zeros again afterwards.
        h_NR: x A^T of all adapters side by side, in the dtype of x.
        b: B [O, R] of each adapter, in the dtype of x; with `ends` those of all experts, one below another.
        ends: int32 [E], one past each expert's last row, which are sorted by expert.
        interprets: whether Triton's interpreter runs the kernel.
    """
    assert NESTED_BLOCKSIZE == 256
    num_rows, width = x_NI.shape
    first = weights[0]
    kind = "int8" if not values else "float" if first.nested is None else "nested"
    num_experts = 1 if ends is None else len(ends)
    widths = [weight.codes.shape[0] // num_experts for weight in weights]
    outputs = [x_NI.new_empty(num_rows, num) for num in widths]
    sub = _columns(blocksize, kind != "int8")
    has_words = all(weight.scales.stride(0) % 4 == 0 and weight.scales.data_ptr() % 4 == 0 for weight in weights)
    words = kind == "nested" and tile.step == 4 and blocksize == sub and has_words
    scales = [weight.scales.view(torch.int32) if words else weight.scales for weight in weights]
    num_tiles = sum(triton.cdiv(num, tile.outputs) for num in widths)
    num_groups = triton.cdiv(num_rows, tile.rows) if ends is None else num_experts
    assert tile.split == 1 or (ends is None and len(counts) >= num_tiles * num_groups)  # an expert counts once
    partials = counts
    if tile.split > 1:
        partials = x_NI.new_empty(num_tiles * num_groups * tile.split * tile.outputs * tile.rows, dtype=torch.float32)
    missing = MAX_WEIGHTS - len(weights)
    ranks = [factor.shape[1] for factor in b]
    factor = 1 / INT8_FACTOR if kind == "int8" else 1 / best_factor(values, x_NI.dtype)
    is_biased = first.bias is not None

    def three(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors, *[tensors[0]] * missing]

    _products_kernel[(num_groups, num_tiles, tile.split)](
        x_NI,
        *three([weight.codes for weight in weights]),
        *three(scales),
        *three([counts if weight.nested is None else weight.nested for weight in weights]),
        *three([x_NI if weight.bias is None else weight.bias for weight in weights]),
        *three(b or [x_NI] * len(weights)),
        *three(outputs),
        x_NI if h_NR is None else h_NR,
        *books,
        counts if ends is None else ends,
        partials,
        counts,
        num_rows,
        width,
        first.codes.stride(0),
        scales[0].stride(0),
        *widths,
        *[0] * missing,
        *[0 if weight.nested is None else len(weight.nested) - 1 for weight in weights],
        *[0] * missing,
        *(ranks or [0] * len(weights)),
        *[0] * missing,
        sum(ranks),
        tile.split,
        factor,
        BLOCKSIZE=blocksize,
        KIND=kind,
        WORDS=words,
        LOOKUP="" if interprets or kind == "int8" else lookup(scaled(values, x_NI.dtype), x_NI.dtype),
        BIAS=is_biased,
        RANK=16 if b else 0,
        WEIGHTS=len(weights),
        GROUPED=ends is not None,
        SUB=sub,
        STEP=tile.step,
        SCALED=tile.scales_weight,
        IS_SPLIT=tile.split > 1,
        OUTPUTS=tile.outputs,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return outputs


def scaled(values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    """The values of codes times their `best_factor`."""
    factor = best_factor(values, dtype)
    return tuple(value * factor for value in values)
