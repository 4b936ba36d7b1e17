"""Triton kernels of the gated activation between LoRA layers (layers/mlp.py), and of its backward.

Imported on GPUs only. Both kernels of backward read the tensors of the MLP's width once, and write the gradients of
gate and up over their values. For small ranks a program goes down a few columns, through many rows, and adds up the
gradients of the adapters' own matrices in registers: products of their own would read those tensors again. The gradient
of x A^T it has of its columns alone, and the sum over programs follows. With larger ranks there are not the registers
for one, nor the memory for the other. Then a program goes along a few rows, and the gradients of the matrices are left
to products.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels import GateInputs
from qlora_fsdp.layers.kernels.launch import kernel, tl, triton


@dataclass(frozen=True)
class GateTiles:
    """How a kernel's work is cut up. The values below were the fastest on an H200, for 16,384 x 14,336 and rank 16."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


FORWARD = GateTiles(rows=64, columns=128, num_warps=4, num_stages=3)
MIN_PROGRAMS = 512
# Of backward:
DOWN = GateTiles(rows=64, columns=64, num_warps=4, num_stages=3)
AT_ONCE = 264  # programs down the columns: an H100 runs two on each of its 132 multiprocessors
MAX_SPLITS = 8
ALONG = GateTiles(rows=64, columns=64, num_warps=4, num_stages=3)
MIN_BACKWARD_PROGRAMS = 1024
MAX_RANK_DOWN = 16
MAX_ROWS = 4096  # of a launch of `down_columns`: at rank 16 its sums of x A^T's gradient are as large as gate's values


@triton.jit
def value_and_slope(gate, ACTIVATION: tl.constexpr):
    """act(gate) and its derivative, for SiLU or for GELU in its tanh form (arXiv:1606.08415)."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    else:
        inner = 0.7978845608028654 * gate * (1.0 + 0.044715 * gate * gate)
        tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        value = 0.5 * gate * (1.0 + tanh)
        slope = 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * 0.7978845608028654 * (
            1.0 + 3.0 * 0.044715 * gate * gate
        )
    return value, slope


@triton.jit
def low_rank(h, b):
    """h B^T, rounded to the dtype of h, as a layer's output is, before it is added to a tile.

    It must change from the layout of a product to that of a loaded tile, and rounded it has half the bytes. That is a
    third faster than letting the product add to the tile.
    """
    return tl.dot(h, b).to(h.dtype).to(tl.float32)


@triton.jit
def load_thin(x, rows, is_row, ranks, rank, stride):
    """Some rows of x A^T or of its gradient. Rows are `stride` apart, as those of two adapters lie side by side."""
    mask = is_row[:, None] & (ranks < rank)[None, :]
    return tl.load(x + rows[:, None] * stride + ranks[None, :], mask=mask, other=0.0)


@triton.jit
def store_thin(x, values, rows, is_row, ranks, rank, stride):
    """The reverse of `load_thin`."""
    mask = is_row[:, None] & (ranks < rank)[None, :]
    tl.store(x + rows[:, None] * stride + ranks[None, :], values, mask=mask)


@triton.jit
def load_b(b, columns, is_column, ranks, rank):
    """Some columns of B^T."""
    mask = (ranks < rank)[:, None] & is_column[None, :]
    return tl.load(b + ranks[:, None] + columns[None, :] * rank, mask=mask, other=0.0)


@kernel
@triton.jit
def _gate_forward_kernel(
    gate_up,
    h,
    b_gate,
    b_up,
    a_down,
    act,
    h_down,
    num_rows,
    width,
    columns_a_split,
    rank_gate,
    rank_up,
    rank_down,
    RANK: tl.constexpr,
    RANK_DOWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    # A tile's first element is addressed with 64 bits. Within the tile 32 bits are enough, and faster.
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    is_row = first_row + rows < num_rows
    gate_up += first_row * (2 * width)
    act += first_row * width
    h += first_row * (rank_gate + rank_up)
    ranks, ranks_down = tl.arange(0, RANK), tl.arange(0, RANK_DOWN)
    h_gate = load_thin(h, rows, is_row, ranks, rank_gate, rank_gate + rank_up)
    h_up = load_thin(h + rank_gate, rows, is_row, ranks, rank_up, rank_gate + rank_up)
    total = tl.zeros([ROWS, RANK_DOWN], tl.float32)
    first = tl.program_id(1) * columns_a_split
    for start in range(first, tl.minimum(first + columns_a_split, width), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = columns < width
        is_both = IS_WHOLE | (is_row[:, None] & is_column[None, :])
        places = rows[:, None] * (2 * width) + columns[None, :]
        b = load_b(b_gate, columns, is_column, ranks, rank_gate)
        gate = tl.load(gate_up + places, mask=is_both, other=0.0).to(tl.float32) + low_rank(h_gate, b)
        b = load_b(b_up, columns, is_column, ranks, rank_up)
        up = tl.load(gate_up + places + width, mask=is_both, other=0.0).to(tl.float32) + low_rank(h_up, b)
        value, _slope = value_and_slope(gate, ACTIVATION)
        product = (value * up).to(act.dtype.element_ty)
        tl.store(act + rows[:, None] * width + columns[None, :], product, mask=is_both)
        a = tl.load(
            a_down + ranks_down[None, :] * width + columns[:, None],
            mask=(ranks_down < rank_down)[None, :] & is_column[:, None],
            other=0.0,
        )
        total = tl.dot(product, a, total)
    part = h_down + (tl.program_id(1).to(tl.int64) * num_rows + first_row) * rank_down
    store_thin(part, total, rows, is_row, ranks_down, rank_down, rank_down)


def forward(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    """The same as `gate_forward` of layers/mlp.py."""
    gate_up, h, b_gate, b_up, a_down, _ = inputs
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = gate_up.new_empty(num_rows, width)
    num_splits, options = split_columns(FORWARD, MIN_PROGRAMS, inputs)
    h_down = torch.empty(num_splits, num_rows, a_down.shape[0], dtype=torch.float32, device=act.device)
    _gate_forward_kernel[(triton.cdiv(num_rows, FORWARD.rows), num_splits)](
        gate_up, h, b_gate, b_up, a_down, act, h_down, num_rows, width, **options
    )
    return act, h_down.sum(0).to(act.dtype)


def split_columns(tiles: GateTiles, min_programs: int, inputs: GateInputs) -> tuple[int, dict[str, object]]:
    """How many programs share the columns, so that there are enough programs, and further arguments of the kernel."""
    num_rows, width = inputs.gate_up_N2F.shape[0], inputs.gate_up_N2F.shape[1] // 2
    wanted = triton.cdiv(min_programs, triton.cdiv(num_rows, tiles.rows))
    columns = triton.cdiv(triton.cdiv(width, wanted), tiles.columns) * tiles.columns
    options = {"columns_a_split": columns, **rank_options(inputs)}
    return triton.cdiv(width, columns), {
        **options,
        **tile_options(tiles, inputs.activation),
        "IS_WHOLE": num_rows % tiles.rows == 0 and width % tiles.columns == 0,
    }


def rank_options(inputs: GateInputs) -> dict[str, object]:
    """The kernels' arguments that tell the adapters' ranks. A product of tiles needs 16 at least."""
    ranks = (inputs.b_gate.shape[1], inputs.b_up.shape[1], inputs.a_down.shape[0])
    return {
        "rank_gate": ranks[0],
        "rank_up": ranks[1],
        "rank_down": ranks[2],
        "RANK": max(16, triton.next_power_of_2(max(ranks[:2]))),
        "RANK_DOWN": max(16, triton.next_power_of_2(ranks[2])),
    }


def tile_options(tiles: GateTiles, activation: str) -> dict[str, object]:
    """The kernels' arguments that tell the tiles and the activation."""
    return {
        "ACTIVATION": activation,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit
def _load_a(a, columns, is_column, ranks, rank, width):
    mask = (ranks < rank)[:, None] & is_column[None, :]
    return tl.load(a + ranks[:, None] * width + columns[None, :], mask=mask, other=0.0)


@kernel
@triton.jit
def _gate_backward_down_kernel(
    gate_up,
    h,
    b_gate,
    b_up,
    a_down,
    grad_act,
    grad_h_down,
    grad_h,
    grad_factors,
    num_rows,
    width,
    rows_a_split,
    scaling_gate,
    scaling_up,
    rank_gate,
    rank_up,
    rank_down,
    RANK: tl.constexpr,
    RANK_DOWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    ranks, ranks_down = tl.arange(0, RANK), tl.arange(0, RANK_DOWN)
    bg = load_b(b_gate, columns, is_column, ranks, rank_gate)
    bu = load_b(b_up, columns, is_column, ranks, rank_up)
    a = _load_a(a_down, columns, is_column, ranks_down, rank_down, width)
    grad_b_gate = tl.zeros([COLUMNS, RANK], tl.float32)
    grad_b_up = tl.zeros([COLUMNS, RANK], tl.float32)
    grad_a_down = tl.zeros([COLUMNS, RANK_DOWN], tl.float32)
    # A program's first row is addressed with 64 bits. From there 32 bits are enough, and faster.
    first_row = tl.program_id(1).to(tl.int64) * rows_a_split
    gate_up += first_row * (2 * width)
    grad_act += first_row * width
    grad_h_down += first_row * rank_down
    h += first_row * (rank_gate + rank_up)
    grad_h += (tl.program_id(0).to(tl.int64) * num_rows + first_row) * (rank_gate + rank_up)
    rows_left = num_rows - first_row
    for start in range(0, tl.minimum(rows_a_split, rows_left), ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < rows_left
        is_both = IS_WHOLE | (is_row[:, None] & is_column[None, :])
        h_gate = load_thin(h, rows, is_row, ranks, rank_gate, rank_gate + rank_up)
        h_up = load_thin(h + rank_gate, rows, is_row, ranks, rank_up, rank_gate + rank_up)
        g_down = load_thin(grad_h_down, rows, is_row, ranks_down, rank_down, rank_down)
        gates = gate_up + rows[:, None] * (2 * width) + columns[None, :]
        gate = tl.load(gates, mask=is_both, other=0.0).to(tl.float32)
        up = tl.load(gates + width, mask=is_both, other=0.0).to(tl.float32)
        grad = tl.load(grad_act + rows[:, None] * width + columns[None, :], mask=is_both, other=0.0).to(tl.float32)
        gate += low_rank(h_gate, bg)
        up += low_rank(h_up, bu)
        grad += low_rank(g_down, a)
        value, slope = value_and_slope(gate, ACTIVATION)
        act = (value * up).to(gate_up.dtype.element_ty)
        grad_a_down = tl.dot(tl.trans(act), g_down, grad_a_down)
        grad_gate = (grad * up * slope).to(gate_up.dtype.element_ty)
        tl.store(gates, grad_gate, mask=is_both)
        part = tl.dot(grad_gate, tl.trans(bg))
        store_thin(grad_h, part, rows, is_row, ranks, rank_gate, rank_gate + rank_up)
        grad_b_gate = tl.dot(tl.trans(grad_gate), h_gate, grad_b_gate)
        grad_up = (grad * value).to(gate_up.dtype.element_ty)
        tl.store(gates + width, grad_up, mask=is_both)
        part = tl.dot(grad_up, tl.trans(bu))
        store_thin(grad_h + rank_gate, part, rows, is_row, ranks, rank_up, rank_gate + rank_up)
        grad_b_up = tl.dot(tl.trans(grad_up), h_up, grad_b_up)
    # The three gradients lie one after another: [F, R] of gate and of up, and [R, F] of down.
    grad_factors += tl.program_id(1).to(tl.int64) * width * (rank_gate + rank_up + rank_down)
    store_thin(grad_factors, grad_b_gate * scaling_gate, columns, is_column, ranks, rank_gate, rank_gate)
    grad_factors += width * rank_gate
    store_thin(grad_factors, grad_b_up * scaling_up, columns, is_column, ranks, rank_up, rank_up)
    grad_factors += width * rank_up
    places, is_place = columns[:, None] + ranks_down[None, :] * width, (ranks_down < rank_down)[None, :]
    tl.store(grad_factors + places, grad_a_down, mask=is_column[:, None] & is_place)


@kernel
@triton.jit
def _gate_backward_along_kernel(
    gate_up,
    h,
    b_gate,
    b_up,
    a_down,
    grad_act,
    grad_h_down,
    grad_h,
    num_rows,
    width,
    columns_a_split,
    rank_gate,
    rank_up,
    rank_down,
    RANK: tl.constexpr,
    RANK_DOWN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    is_row = first_row + rows < num_rows
    gate_up += first_row * (2 * width)
    grad_act += first_row * width
    grad_h_down += first_row * rank_down
    h += first_row * (rank_gate + rank_up)
    ranks, ranks_down = tl.arange(0, RANK), tl.arange(0, RANK_DOWN)
    h_gate = load_thin(h, rows, is_row, ranks, rank_gate, rank_gate + rank_up)
    h_up = load_thin(h + rank_gate, rows, is_row, ranks, rank_up, rank_gate + rank_up)
    g_down = load_thin(grad_h_down, rows, is_row, ranks_down, rank_down, rank_down)
    total_gate = tl.zeros([ROWS, RANK], tl.float32)
    total_up = tl.zeros([ROWS, RANK], tl.float32)
    first = tl.program_id(1) * columns_a_split
    last = tl.minimum(first + columns_a_split, width)
    gate_rows, grad_rows = gate_up + rows[:, None] * (2 * width), grad_act + rows[:, None] * width
    for start in range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = columns < width
        is_both = IS_WHOLE | (is_row[:, None] & is_column[None, :])
        gate = tl.load(gate_rows + columns[None, :], mask=is_both, other=0.0).to(tl.float32)
        up = tl.load(gate_rows + width + columns[None, :], mask=is_both, other=0.0).to(tl.float32)
        grad = tl.load(grad_rows + columns[None, :], mask=is_both, other=0.0).to(tl.float32)
        bg = load_b(b_gate, columns, is_column, ranks, rank_gate)
        bu = load_b(b_up, columns, is_column, ranks, rank_up)
        a = _load_a(a_down, columns, is_column, ranks_down, rank_down, width)
        gate += low_rank(h_gate, bg)
        up += low_rank(h_up, bu)
        grad += low_rank(g_down, a)
        value, slope = value_and_slope(gate, ACTIVATION)
        tl.store(grad_rows + columns[None, :], (value * up).to(gate_up.dtype.element_ty), mask=is_both)
        grad_gate = (grad * up * slope).to(gate_up.dtype.element_ty)
        tl.store(gate_rows + columns[None, :], grad_gate, mask=is_both)
        total_gate = tl.dot(grad_gate, tl.trans(bg), total_gate)
        grad_up = (grad * value).to(gate_up.dtype.element_ty)
        tl.store(gate_rows + width + columns[None, :], grad_up, mask=is_both)
        total_up = tl.dot(grad_up, tl.trans(bu), total_up)
    part = grad_h + (tl.program_id(1).to(tl.int64) * num_rows + first_row) * (rank_gate + rank_up)
    store_thin(part, total_gate, rows, is_row, ranks, rank_gate, rank_gate + rank_up)
    store_thin(part + rank_gate, total_up, rows, is_row, ranks, rank_up, rank_gate + rank_up)


def down_columns(
    inputs: GateInputs, grad_act: Tensor, grad_h_down: Tensor, scalings: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `gate_backward` of layers/mlp.py; `grad_act` stays as it is."""
    gate_up, h, b_gate, b_up, a_down, activation = inputs
    width, num_blocks = len(b_gate), triton.cdiv(len(b_gate), DOWN.columns)
    rows_a_split = _rows_a_split(min(len(h), MAX_ROWS), num_blocks)
    sizes = [b_gate.numel(), b_up.numel(), a_down.numel()]
    options = {**rank_options(inputs), **tile_options(DOWN, activation)}
    grads_h, grads_factors = [], []
    for part in zip(*(x.split(MAX_ROWS) for x in (gate_up, h, grad_act, grad_h_down)), strict=True):
        gate_up_rows, h_rows, *grads_rows = part
        num_rows, num_splits = len(h_rows), triton.cdiv(len(h_rows), rows_a_split)
        grad_h = torch.empty(num_blocks, *h_rows.shape, dtype=torch.float32, device=h.device)
        grad_factors = torch.empty(num_splits, sum(sizes), dtype=torch.float32, device=h.device)
        options["IS_WHOLE"] = num_rows % DOWN.rows == 0 and width % DOWN.columns == 0
        factors, outputs = (b_gate, b_up, a_down), (grad_h, grad_factors)
        _gate_backward_down_kernel[(num_blocks, num_splits)](
            gate_up_rows, h_rows, *factors, *grads_rows, *outputs, num_rows, width, rows_a_split, *scalings, **options
        )
        grads_h.append(grad_h.sum(0).to(h.dtype))
        grads_factors.append(grad_factors.sum(0))
        del grad_h, outputs  # so that the next part's can have its memory
    torch.autograd.graph.increment_version(gate_up)
    grad_b_gate, grad_b_up, grad_a_down = reduce(torch.add, grads_factors).split(sizes)
    return torch.cat(grads_h), grad_b_gate.view_as(b_gate), grad_b_up.view_as(b_up), grad_a_down.view_as(a_down)


def _rows_a_split(num_rows: int, num_blocks: int) -> int:
    """How many rows a program takes, so that the GPU is full while programs run, down to the last of them."""
    num_splits = min(range(1, MAX_SPLITS + 1), key=lambda splits: triton.cdiv(num_blocks * splits, AT_ONCE) / splits)
    num_tiles: int = triton.cdiv(triton.cdiv(num_rows, num_splits), DOWN.rows)
    return num_tiles * DOWN.rows


def along_rows(inputs: GateInputs, grad_act: Tensor, grad_h_down: Tensor) -> Tensor:
    """The gradient of h, of what `gate_backward` of layers/mlp.py gives. Writes the activation over `grad_act`."""
    gate_up, h, b_gate, b_up, a_down, _ = inputs
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    num_splits, options = split_columns(ALONG, MIN_BACKWARD_PROGRAMS, inputs)
    grad_h = torch.empty(num_splits, *h.shape, dtype=torch.float32, device=h.device)
    _gate_backward_along_kernel[(triton.cdiv(num_rows, ALONG.rows), num_splits)](
        gate_up, h, b_gate, b_up, a_down, grad_act, grad_h_down, grad_h, num_rows, width, **options
    )
    torch.autograd.graph.increment_version((gate_up, grad_act))
    return grad_h.sum(0).to(h.dtype)
