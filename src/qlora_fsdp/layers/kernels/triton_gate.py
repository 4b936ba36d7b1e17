"""Triton kernels of the gated activation between LoRA layers (layers/gated_activation.py). Imported on GPUs only."""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton


@dataclass(frozen=True)
class Tiles:
    """How a kernel's work is cut up. The values below were the fastest on an H200, for 16,384 x 14,336 and rank 16."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    min_programs: int


FORWARD = Tiles(rows=64, columns=128, num_warps=4, num_stages=3, min_programs=512)
BACKWARD = Tiles(rows=64, columns=64, num_warps=4, num_stages=3, min_programs=1024)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
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
def _low_rank(h, b):
    # The result is rounded to the dtype of h, as a layer's output is, before it is added to a tile. It must change from
    # the layout of a product to that of a loaded tile, and rounded it has half the bytes. That is a third faster than
    # letting the product add to the tile.
    return tl.dot(h, b, input_precision="ieee").to(h.dtype).to(tl.float32)


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
    h_rows = h + rows[:, None] * (rank_gate + rank_up) + ranks[None, :]
    h_gate = tl.load(h_rows, mask=is_row[:, None] & (ranks < rank_gate)[None, :], other=0.0)
    h_up = tl.load(h_rows + rank_gate, mask=is_row[:, None] & (ranks < rank_up)[None, :], other=0.0)
    total = tl.zeros([ROWS, RANK_DOWN], tl.float32)
    first = tl.program_id(1) * columns_a_split
    for start in range(first, tl.minimum(first + columns_a_split, width), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = columns < width
        is_both = IS_WHOLE | (is_row[:, None] & is_column[None, :])
        places = rows[:, None] * (2 * width) + columns[None, :]
        b = tl.load(
            b_gate + ranks[:, None] + columns[None, :] * rank_gate,
            mask=(ranks < rank_gate)[:, None] & is_column[None, :],
            other=0.0,
        )
        gate = tl.load(gate_up + places, mask=is_both, other=0.0).to(tl.float32) + _low_rank(h_gate, b)
        b = tl.load(
            b_up + ranks[:, None] + columns[None, :] * rank_up,
            mask=(ranks < rank_up)[:, None] & is_column[None, :],
            other=0.0,
        )
        up = tl.load(gate_up + places + width, mask=is_both, other=0.0).to(tl.float32) + _low_rank(h_up, b)
        value, _slope = _activate(gate, ACTIVATION)
        product = (value * up).to(act.dtype.element_ty)
        tl.store(act + rows[:, None] * width + columns[None, :], product, mask=is_both)
        a = tl.load(
            a_down + ranks_down[None, :] * width + columns[:, None],
            mask=(ranks_down < rank_down)[None, :] & is_column[:, None],
            other=0.0,
        )
        total = tl.dot(product, a, total, input_precision="ieee")
    part = h_down + (tl.program_id(1).to(tl.int64) * num_rows + first_row) * rank_down
    places = part + rows[:, None] * rank_down + ranks_down[None, :]
    tl.store(places, total, mask=is_row[:, None] & (ranks_down < rank_down)[None, :])


@kernel
@triton.jit
def _gate_backward_kernel(
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
    # A tile's first element is addressed with 64 bits. Within the tile 32 bits are enough, and faster.
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    is_row = first_row + rows < num_rows
    gate_up += first_row * (2 * width)
    grad_act += first_row * width
    grad_h_down += first_row * rank_down
    h += first_row * (rank_gate + rank_up)
    ranks, ranks_down = tl.arange(0, RANK), tl.arange(0, RANK_DOWN)
    h_rows = rows[:, None] * (rank_gate + rank_up) + ranks[None, :]
    is_gate, is_up = is_row[:, None] & (ranks < rank_gate)[None, :], is_row[:, None] & (ranks < rank_up)[None, :]
    h_gate = tl.load(h + h_rows, mask=is_gate, other=0.0)
    h_up = tl.load(h + h_rows + rank_gate, mask=is_up, other=0.0)
    g_down = tl.load(
        grad_h_down + rows[:, None] * rank_down + ranks_down[None, :],
        mask=is_row[:, None] & (ranks_down < rank_down)[None, :],
        other=0.0,
    )
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
        bg = tl.load(
            b_gate + ranks[:, None] + columns[None, :] * rank_gate,
            mask=(ranks < rank_gate)[:, None] & is_column[None, :],
            other=0.0,
        )
        bu = tl.load(
            b_up + ranks[:, None] + columns[None, :] * rank_up,
            mask=(ranks < rank_up)[:, None] & is_column[None, :],
            other=0.0,
        )
        a = tl.load(
            a_down + ranks_down[:, None] * width + columns[None, :],
            mask=(ranks_down < rank_down)[:, None] & is_column[None, :],
            other=0.0,
        )
        gate += _low_rank(h_gate, bg)
        up += _low_rank(h_up, bu)
        grad += _low_rank(g_down, a)
        value, slope = _activate(gate, ACTIVATION)
        tl.store(grad_rows + columns[None, :], (value * up).to(gate_up.dtype.element_ty), mask=is_both)
        grad_gate = (grad * up * slope).to(gate_up.dtype.element_ty)
        tl.store(gate_rows + columns[None, :], grad_gate, mask=is_both)
        total_gate = tl.dot(grad_gate, tl.trans(bg), total_gate, input_precision="ieee")
        grad_up = (grad * value).to(gate_up.dtype.element_ty)
        tl.store(gate_rows + width + columns[None, :], grad_up, mask=is_both)
        total_up = tl.dot(grad_up, tl.trans(bu), total_up, input_precision="ieee")
    part = grad_h + (tl.program_id(1).to(tl.int64) * num_rows + first_row) * (rank_gate + rank_up)
    tl.store(part + h_rows, total_gate, mask=is_gate)
    tl.store(part + h_rows + rank_gate, total_up, mask=is_up)


def forward(
    gate_up: Tensor, h: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The same as `gated_activation.gate_forward`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act = gate_up.new_empty(num_rows, width)
    num_splits, options = _split(FORWARD, num_rows, width, b_gate, b_up, a_down, activation)
    h_down = torch.empty(num_splits, num_rows, a_down.shape[0], dtype=torch.float32, device=act.device)
    _gate_forward_kernel[(triton.cdiv(num_rows, FORWARD.rows), num_splits)](
        gate_up, h, b_gate, b_up, a_down, act, h_down, num_rows, width, **options
    )
    return act, h_down.sum(0).to(act.dtype)


def backward(
    gate_up: Tensor,
    h: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    grad_act: Tensor,
    grad_h_down: Tensor,
    activation: str,
) -> Tensor:
    """The same as `gated_activation.gate_backward`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    num_splits, options = _split(BACKWARD, num_rows, width, b_gate, b_up, a_down, activation)
    grad_h = torch.empty(num_splits, *h.shape, dtype=torch.float32, device=h.device)
    _gate_backward_kernel[(triton.cdiv(num_rows, BACKWARD.rows), num_splits)](
        gate_up, h, b_gate, b_up, a_down, grad_act, grad_h_down, grad_h, num_rows, width, **options
    )
    torch.autograd.graph.increment_version((gate_up, grad_act))
    return grad_h.sum(0).to(h.dtype)


def _split(
    tiles: Tiles, num_rows: int, width: int, b_gate: Tensor, b_up: Tensor, a_down: Tensor, activation: str
) -> tuple[int, dict[str, object]]:
    """How many programs share the columns, so that there are enough programs, and the arguments of both kernels."""
    ranks = (b_gate.shape[1], b_up.shape[1], a_down.shape[0])
    wanted = triton.cdiv(tiles.min_programs, triton.cdiv(num_rows, tiles.rows))
    columns = triton.cdiv(triton.cdiv(width, wanted), tiles.columns) * tiles.columns
    return triton.cdiv(width, columns), {
        "columns_a_split": columns,
        "rank_gate": ranks[0],
        "rank_up": ranks[1],
        "rank_down": ranks[2],
        "RANK": max(16, triton.next_power_of_2(max(ranks[:2]))),
        "RANK_DOWN": max(16, triton.next_power_of_2(ranks[2])),
        "ACTIVATION": activation,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "IS_WHOLE": num_rows % tiles.rows == 0 and width % tiles.columns == 0,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
