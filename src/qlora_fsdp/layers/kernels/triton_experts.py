"""Triton kernels that move and activate the rows of experts (layers/experts/row_order.py), and convert their adapters.

Imported on GPUs only. Each passes over the memory once. Shapes: T tokens, K experts per token, S = T K rows, H hidden
size, I inner size; E experts, R the rank of an adapter, X the other dimension of one of its matrices.
"""

# Triton reads the kernels' source: annotations must stay objects, so there is no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
from torch import Tensor

from qlora_fsdp.layers.kernels.launch import kernel, tl, triton
from qlora_fsdp.layers.kernels.triton_gate import value_and_slope

MAX_BLOCK = 2048  # columns that a program holds at a time
MAX_IN_TURN = 512  # the same in backward, where gate and up are in turn: 207 us in place of 549 (16,384 x 2,880, H100)
TILE = 8192, 2048  # elements of adapters that a program converts, with and without transposing them
RANKED = 32, 256  # pairs that a program ranks, and those that it compares them with at a time
MAX_RANKED = 4096  # pairs; above, sorting takes less time than comparing all with all
Gate = tuple[str, bool, float, float, float]  # the fields of expert_gate.Gate


@kernel
@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _rank_kernel(
    expert, order, position, ends, num_pairs, num_experts, PAIRS: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """Each program counts the pairs that come before some pairs; the last ones, the rows up to the end of experts."""
    num_ranking = tl.cdiv(num_pairs, PAIRS)
    program = tl.program_id(0)
    own = program * PAIRS + tl.arange(0, PAIRS)
    is_own = own < num_pairs
    limit = tl.load(expert + own, mask=is_own, other=0).to(tl.int32) * num_pairs + own
    if program >= num_ranking:
        own -= num_ranking * PAIRS
        is_own = own < num_experts
        limit = (own + 1) * num_pairs
    before = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, OTHERS):
        others = start + tl.arange(0, OTHERS)
        is_other = others < num_pairs
        place = tl.load(expert + others, mask=is_other, other=0).to(tl.int32) * num_pairs + others
        is_before = (place[None, :] < limit[:, None]) & is_other[None, :]
        before += tl.sum(is_before.to(tl.int32), axis=1)
    if program < num_ranking:
        tl.store(position + own, before, mask=is_own)
        tl.store(order + before, own, mask=is_own)
    else:
        tl.store(ends + own, before, mask=is_own)


def rank_rows(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `row_order.sort_rows` finds, for at most MAX_RANKED pairs: each is compared with all, in one launch.

    Args:
        index_TK: the experts of each token, int64 or int32, contiguous.
        num_experts: E.

    Returns:
        int32 order [S], position [T, K] and ends [E] of a `RowOrder`.
    """
    num_pairs = index_TK.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=index_TK.device)
    position = torch.empty(index_TK.shape, dtype=torch.int32, device=index_TK.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=index_TK.device)
    pairs, others = RANKED
    num_programs = triton.cdiv(num_pairs, pairs) + triton.cdiv(num_experts, pairs)
    _rank_kernel[(num_programs,)](
        index_TK, order, position, ends, num_pairs, num_experts, PAIRS=pairs, OTHERS=others, num_warps=4
    )
    return order, position, ends


@kernel
@triton.jit
def _gather_kernel(x, token, out, width, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = x + tl.load(token + row).to(tl.int64) * x_stride
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < width)
        tl.store(out + row * out_stride + columns, values, mask=columns < width)


@kernel
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
def _load_pair(row, columns, width, is_column, INTERLEAVED: tl.constexpr):
    """The gate's and the other outputs of `up`, float32 [BLOCK] each: side by side, or in turn."""
    if INTERLEAVED:
        places = row + 2 * columns[:, None] + tl.arange(0, 2)[None, :]
        gate, up = tl.split(tl.load(places, mask=is_column[:, None], other=0.0))
    else:
        gate = tl.load(row + columns, mask=is_column, other=0.0)
        up = tl.load(row + width + columns, mask=is_column, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _clamped(gate, up, limit):
    """Both within the limit, and whether each was: the gate has no lower one."""
    is_gate, is_up = gate <= limit, tl.abs(up) <= limit
    all_nans: tl.constexpr = tl.PropagateNan.ALL
    gate = tl.minimum(gate, limit, propagate_nan=all_nans)
    up = tl.maximum(tl.minimum(up, limit, propagate_nan=all_nans), -limit, propagate_nan=all_nans)
    return gate, up, is_gate, is_up


@triton.jit
def _act(gate, alpha, KIND: tl.constexpr):
    """act(gate) and its derivative; with silu, alpha is the factor within the sigmoid."""
    if KIND == "silu":
        value, slope = value_and_slope(gate * alpha, KIND)
        value = value / alpha
    else:
        value, slope = value_and_slope(gate, KIND)
    return value, slope


@kernel
@triton.jit
def _activate_kernel(
    y,
    weight,
    out,
    width,
    out_stride,
    alpha,
    limit,
    offset,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        gate, up = _load_pair(y + row * 2 * width, columns, width, columns < width, INTERLEAVED)
        gate, up, _is_gate, _is_up = _clamped(gate, up, limit)
        value, _slope = _act(gate, alpha, KIND)
        product = (value * (up + offset) * w).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + columns, product, mask=columns < width)


@kernel
@triton.jit
def _activate_backward_kernel(
    y,
    weight,
    grad,
    out,
    act,
    grad_weight,
    width,
    out_stride,
    alpha,
    limit,
    offset,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < width
        gate, up = _load_pair(y + row * 2 * width, columns, width, is_column, INTERLEAVED)
        gate, up, is_gate, is_up = _clamped(gate, up, limit)
        g = tl.load(grad + row * width + columns, mask=is_column, other=0.0).to(tl.float32)
        value, slope = _act(gate, alpha, KIND)
        product = value * (up + offset)
        total += g * product
        tl.store(act + row * width + columns, (product * w).to(act.dtype.element_ty), mask=is_column)
        grad_gate = tl.where(is_gate, g * w * (up + offset) * slope, 0.0).to(out.dtype.element_ty)
        grad_up = tl.where(is_up, g * w * value, 0.0).to(out.dtype.element_ty)
        target = out + row * out_stride
        if INTERLEAVED:
            places = target + 2 * columns[:, None] + tl.arange(0, 2)[None, :]
            tl.store(places, tl.join(grad_gate, grad_up), mask=is_column[:, None])
        else:
            tl.store(target + columns, grad_gate, mask=is_column)
            tl.store(target + width + columns, grad_up, mask=is_column)
    tl.store(grad_weight + row, tl.sum(total, 0))


@kernel
@triton.jit
def _write_matrices_kernel(
    source,
    out,
    factor,
    num_experts,
    source_rank,
    rank,
    width,
    source_expert_stride,
    source_rank_stride,
    source_stride,
    expert_stride,
    rank_stride,
    stride,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile of EXPERTS x RANKS x COLUMNS. Its loads and stores each follow the layout of their own side."""
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, None, :]
    expert = (tl.program_id(1).to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS))[:, None, None]
    row = (tl.program_id(2).to(tl.int64) * RANKS + tl.arange(0, RANKS))[None, :, None]
    is_there = (expert < num_experts) & (column < width)
    places = expert * source_expert_stride + row * source_rank_stride + column * source_stride
    values = tl.load(source + places, mask=is_there & (row < source_rank), other=0.0).to(tl.float32) * factor
    places = expert * expert_stride + row * rank_stride + column * stride
    tl.store(out + places, values.to(out.dtype.element_ty), mask=is_there & (row < rank))


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


def activate(y_SU: Tensor, w_S: Tensor, gate: Gate, out: Tensor) -> None:
    """out = w act(gate's half of y) (other half of y + offset); `out` [S, I] may have strided rows."""
    num_rows, width = y_SU.shape[0], y_SU.shape[1] // 2
    kind, is_interleaved, alpha, limit, offset = gate
    _activate_kernel[(num_rows,)](
        y_SU,
        w_S,
        out,
        width,
        out.stride(0),
        alpha,
        limit,
        offset,
        KIND=kind,
        INTERLEAVED=is_interleaved,
        BLOCK=_block(width),
        num_warps=4,
    )


def activate_backward(y_SU: Tensor, w_S: Tensor, grad_SI: Tensor, gate: Gate, out: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass of `activate`.

    Args:
        y_SU: the input.
        w_S: the routing weights.
        grad_SI: the gradient of the output; contiguous.
        gate: what was computed.
        out: [S, U], whose rows may be strided; filled with the gradient of y.

    Returns:
        The output of `activate` [S, I], and the gradient of w, float32 [S].
    """
    num_rows, width = grad_SI.shape
    kind, is_interleaved, alpha, limit, offset = gate
    act, grad_w = torch.empty_like(grad_SI), torch.empty(num_rows, dtype=torch.float32, device=y_SU.device)
    block = _block(width)
    _activate_backward_kernel[(num_rows,)](
        y_SU,
        w_S,
        grad_SI,
        out,
        act,
        grad_w,
        width,
        out.stride(0),
        alpha,
        limit,
        offset,
        KIND=kind,
        INTERLEAVED=is_interleaved,
        BLOCK=min(MAX_IN_TURN, block) if is_interleaved else block,
        num_warps=4,
    )
    return act, grad_w


def write_matrices(source_ERX: Tensor, factor: float, out_ERX: Tensor) -> None:
    """out = source * factor, multiplied in float32; ranks that the source does not have are zero. Both are strided."""
    num_experts, rank, width = out_ERX.shape
    transposes = 1 in (source_ERX.stride(0), out_ERX.stride(0))  # one side has experts next to one another
    experts = min(32, triton.next_power_of_2(num_experts)) if transposes else 1
    ranks = min(16, triton.next_power_of_2(rank))
    columns = TILE[0 if transposes else 1] // (experts * ranks)
    grid = triton.cdiv(width, columns), triton.cdiv(num_experts, experts), triton.cdiv(rank, ranks)
    _write_matrices_kernel[grid](
        source_ERX,
        out_ERX,
        factor,
        num_experts,
        source_ERX.shape[1],
        rank,
        width,
        *source_ERX.stride(),
        *out_ERX.stride(),
        EXPERTS=experts,
        RANKS=ranks,
        COLUMNS=columns,
        num_warps=8 if transposes else 4,
    )


def _block(width: int) -> int:
    block: int = min(MAX_BLOCK, triton.next_power_of_2(width))
    return block
