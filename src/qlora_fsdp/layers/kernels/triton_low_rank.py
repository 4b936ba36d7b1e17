"""Triton kernels of adapters' products for the few rows of a step of generated text. Imported on GPUs only.

A step has a row for each text, and its adapters some hundred thin matrices. Each product takes a GPU a microsecond and
each kernel about three to start and to end, so what counts is the number of kernels: one for h = x A^T of all layers
that share an input, where cuBLAS takes two (it splits the sum over columns), and one that adds h B^T to the outputs of
all of them.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from collections.abc import Sequence

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton

MAX_LAYERS = 3  # that share an input
TILE = 8192  # elements of x that a program of the first kernel has at a time


@kernel
@triton.jit
def _first_kernel(x, a, h, num_rows, width, rank, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program computes the products of all rows of x with one row of A."""
    number = tl.program_id(0)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        is_column = start + columns < width
        factors = tl.load(a + number * width + start + columns, mask=is_column, other=0.0).to(tl.float32)
        is_both = (rows < num_rows)[:, None] & is_column[None, :]
        values = tl.load(x + rows[:, None] * width + start + columns[None, :], mask=is_both, other=0.0)
        total += values.to(tl.float32) * factors[None, :]
    tl.store(h + rows * rank + number, tl.sum(total, 1), mask=rows < num_rows)


@triton.jit
def _add(block, h, b, y, num_rows, width, rank, rank_all, RANK: tl.constexpr, COLUMNS: tl.constexpr):
    columns, ranks = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    is_column, is_rank = columns < width, ranks < rank
    places = b + columns[:, None] * rank + ranks[None, :]
    factors = tl.load(places, mask=is_column[:, None] & is_rank[None, :], other=0.0).to(tl.float32)
    for row in range(num_rows):
        low = tl.load(h + row * rank_all + ranks, mask=is_rank, other=0.0)
        own = tl.load(y + row * width + columns, mask=is_column, other=0.0)
        total = own.to(tl.float32) + tl.sum(factors * low[None, :], 1)
        tl.store(y + row * width + columns, total.to(own.dtype), mask=is_column)


@kernel
@triton.jit
def _second_kernel(
    h, b_0, b_1, b_2, y_0, y_1, y_2, num_rows, rank_all, width_0, width_1, width_2, rank_0, rank_1, rank_2,
    RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program adds to some columns of one layer's output, in all rows."""
    block = tl.program_id(0)
    end_0 = tl.cdiv(width_0, COLUMNS)
    end_1 = end_0 + tl.cdiv(width_1, COLUMNS)
    if block < end_0:
        _add(block, h, b_0, y_0, num_rows, width_0, rank_0, rank_all, RANK, COLUMNS)
    elif block < end_1:
        _add(block - end_0, h + rank_0, b_1, y_1, num_rows, width_1, rank_1, rank_all, RANK, COLUMNS)
    else:
        _add(block - end_1, h + rank_0 + rank_1, b_2, y_2, num_rows, width_2, rank_2, rank_all, RANK, COLUMNS)


def first(x_NI: Tensor, a_RI: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """h = x A^T [N, R] in a dtype, of few rows."""
    (num_rows, width), rank = x_NI.shape, a_RI.shape[0]
    rows = triton.next_power_of_2(num_rows)
    columns = min(TILE // rows, triton.next_power_of_2(width))
    h_NR = torch.empty(num_rows, rank, dtype=dtype, device=x_NI.device)
    _first_kernel[(rank,)](
        x_NI.contiguous(), a_RI, h_NR, num_rows, width, rank, ROWS=rows, COLUMNS=columns, num_warps=8
    )
    return h_NR


def add_second(h_NR: Tensor, factors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """y += h B^T in place, for each of at most MAX_LAYERS layers.

    Args:
        h_NR: what `first` gave, the layers' parts side by side.
        factors: B [O, R] of each layer.
        outputs: y [N, O] of each layer, contiguous.
    """
    missing = MAX_LAYERS - len(factors)
    widths, ranks = [b.shape[0] for b in factors], [b.shape[1] for b in factors]
    rank = triton.next_power_of_2(max(ranks))
    columns = max(16, 1024 // rank)
    _second_kernel[(sum(triton.cdiv(width, columns) for width in widths),)](
        h_NR,
        *factors,
        *[factors[0]] * missing,  # of layers that have no program
        *outputs,
        *[outputs[0]] * missing,
        h_NR.shape[0],
        h_NR.shape[1],
        *widths,
        *[0] * missing,
        *ranks,
        *[0] * missing,
        RANK=rank,
        COLUMNS=columns,
        num_warps=4,
    )
