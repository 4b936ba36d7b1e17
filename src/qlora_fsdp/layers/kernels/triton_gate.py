"""Triton kernel of the gated activation between LoRA layers (layers/mlp.py). Imported on GPUs only."""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from dataclasses import dataclass

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


FORWARD, MIN_PROGRAMS = GateTiles(rows=64, columns=128, num_warps=4, num_stages=3), 512


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
