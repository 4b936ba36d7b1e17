"""Grouped products: each row times the weight of its expert, which is dequantized for the product alone.

Shapes: S rows, sorted by expert; E experts; K what is summed over, N outputs; R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.expert_rows import Rows
from qlora_fsdp.layers.quantized_experts import QuantizedExpertWeight

# What the dequantized weights of one product may take. A layer whose experts need more is computed in slices, for which
# the host has to know how many tokens each expert got, so it waits for the GPU.
SLICE_BYTES = 2**30

ExpertWeight = QuantizedExpertWeight | nn.Parameter


def beside_low_rank(
    width: int, fill: Callable[[Tensor], None], low_rank: Tensor | None, rows: Rows, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A factor of a large product, with the low-rank product that is to be added to it in columns of its own.

    The large product then sums over the columns of both, in the products' own precision: what an adapter adds is not
    rounded before it is added, and no pass over the memory adds it.

    Args:
        width: columns of the factor itself.
        fill: writes the factor [S, width] into a tensor whose rows are strided.
        low_rank: [E, width, R], what the factor is multiplied by for the low-rank product; None without adapter.
        rows: which rows belong to which expert.
        like: a tensor of the dtype and device wanted.

    Returns:
        [S, width + R], and the low-rank product [S, R], a tensor of its own; None without adapter.
    """
    rank = 0 if low_rank is None else low_rank.shape[2]
    both = like.new_empty(len(rows.order), width + rank)
    factor = both[:, :width]
    fill(factor)
    if low_rank is None:
        return both, None
    low = F.grouped_mm(factor, low_rank, offs=rows.ends)
    both[:, width:] = low
    return both, low


def product(input_SK: Tensor, weight: ExpertWeight, extra: Tensor | None, sums_over_rows: bool, rows: Rows) -> Tensor:
    """Each row of the input times the weight of its expert: [S, N].

    Args:
        input_SK: its columns are the dimension that is summed over, then those of the low-rank product.
        weight: of all experts, [E, rows, columns].
        extra: the rest of the low-rank product [E, R, N]; None without adapter.
        sums_over_rows: whether the sum runs over the weight's rows (y = x W) or its columns (y = x W^T).
        rows: which rows belong to which expert.
    """
    num_experts, num_rows, num_columns = weight.shape
    num_outputs = num_columns if sums_over_rows else num_rows
    if isinstance(weight, nn.Parameter) and extra is None:
        return F.grouped_mm(input_SK, weight if sums_over_rows else weight.transpose(1, 2), offs=rows.ends)
    expert_bytes = input_SK.shape[1] * num_outputs * input_SK.dtype.itemsize
    if num_experts * expert_bytes <= SLICE_BYTES:
        factor = _factor(weight, extra, 0, num_experts, sums_over_rows, input_SK)
        return F.grouped_mm(input_SK, factor, offs=rows.ends)
    y_SN = input_SK.new_empty(len(rows.order), num_outputs)
    for first, last, begin, end in _slices(rows, max(1, SLICE_BYTES // expert_bytes)):
        part = None if extra is None else extra[first:last]
        factor = _factor(weight, part, first, last, sums_over_rows, input_SK)
        y_SN[begin:end] = F.grouped_mm(input_SK[begin:end], factor, offs=rows.ends[first:last] - begin)
        del factor
    return y_SN


def _slices(rows: Rows, num_experts: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of at most `num_experts` experts that got tokens: first and last expert, first and last row."""
    num_rows, size = len(rows.order), len(rows.ends)  # a plan has no values: as if all experts got as many rows
    ends = [num_rows * (e + 1) // size for e in range(size)] if rows.ends.is_meta else rows.ends.tolist()
    starts = [0, *ends[:-1]]
    first = 0
    while first < len(ends):
        if ends[first] == starts[first]:
            first += 1
            continue
        last = min(first + num_experts, len(ends))
        yield first, last, starts[first], ends[last - 1]
        first = last


def _factor(
    weight: ExpertWeight, extra: Tensor | None, first: int, last: int, sums_over_rows: bool, like: Tensor
) -> Tensor:
    """The weights of the experts [first, last) with those of the low-rank product: [n, K + R, N] in `like`'s dtype."""
    _, num_rows, num_columns = weight.shape
    rank = 0 if extra is None else extra.shape[1]
    size = (num_rows + rank, num_columns) if sums_over_rows else (num_rows, num_columns + rank)
    both = like.new_empty(last - first, *size)
    target = both[:, :num_rows, :num_columns]
    if isinstance(weight, QuantizedExpertWeight):
        weight.fill(target, first)
    else:
        target.copy_(weight[first:last])
    factor = both if sums_over_rows else both.transpose(1, 2)
    if extra is not None:
        factor[:, -rank:] = extra
    return factor
