"""Grouped products: each row times the weight of its expert, which is dequantized for the product alone.

Shapes: S rows, sorted by expert; E experts; K what is summed over, N outputs; R the rank of an adapter.

The weight of all experts of a layer in one tensor, stored as codes and scales.

transformers keeps the experts of a mixture-of-experts layer in single tensors of three dimensions: `gate_up_proj` [E,
2I, H] and `down_proj` [E, H, I] (transposed in some models, such as gpt-oss). Quantization looks at one row at a time,
so such a tensor is quantized like the matrix of all its rows, [E * rows, columns]. The bytes are those that
bitsandbytes' `nn.parametrize.replace_parameter_4bit` makes of it. FSDP2 splits the rows over the ranks, wherever an
expert begins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.experts.adapter import ExpertMatrix
from qlora_fsdp.layers.experts.row_order import RowOrder
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight


class QuantizedExpertWeight(StoredWeight):
    """One weight of all experts of a layer, as a `StoredWeight` with the rows of all experts.

    Args:
        shape: [E, rows, columns]; E experts.
        format: how the weight is quantized.
        dtype: the compute dtype, to which it is dequantized.
        device: where the Parameters are made; usually meta.
        is_turned: whether each matrix is the transpose of the one that transformers' class has.
    """

    bias = None

    def __init__(
        self,
        shape: tuple[int, int, int],
        format: Format,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
        is_turned: bool = False,
    ) -> None:
        super().__init__()
        self.is_turned = is_turned
        assert format.why_not(shape[2]) is None
        self.shape = torch.Size(shape)
        self._make_parts(shape[0] * shape[1], shape[2], format, dtype, device)

    @property
    def weight(self) -> Tensor:
        """The weight [E, rows, columns] in the compute dtype, dequantized anew at each access."""
        return super().weight.view(self.shape)

    def fill(self, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Write some rows and columns of every expert into `out` [E, rows, columns], which may be strided.

        Args:
            out: its rows are those of each expert from `first_row` on.
            first_row: the first row to write of each expert.
            first_column: a multiple of the block size. So is the number of columns.
        """
        self.format.dequantize_part(self.named_parts(), out, first_row, first_column)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format.quant_type}, double_quant={self.format.double_quant}"


# What the dequantized weights of one product may take: four times as much as the rows that go in and come out, within
# these bounds. If all experts need more, some of the product's columns are made at a time, for all experts, which asks
# the GPU for no numbers of rows. So a short step, which may be meant for a small GPU, holds little at a time. A longer
# one would lose time: each slice reads all rows that go in, and copies what comes out into its columns.
SLICE_FOR_ROWS = 4
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 2**29, 2**30
COLUMNS_MULTIPLE = 128  # of the largest block of a 4-bit weight that is quantized here, int4's

ExpertWeight = QuantizedExpertWeight | nn.Parameter


def beside_low_rank(
    width: int, fill: Callable[[Tensor], None], low_rank: ExpertMatrix | None, rows: RowOrder, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A factor of a large product, with the low-rank product that is to be added to it in columns of its own.

    The large product then sums over the columns of both, in the products' own precision: what an adapter adds is not
    rounded before it is added, and no pass over the memory adds it.

    Args:
        width: columns of the factor itself.
        fill: writes the factor [S, width] into a tensor whose rows are strided.
        low_rank: what the factor is multiplied by for the low-rank product, of this width; None without adapter.
        rows: which rows belong to which expert.
        like: a tensor of the dtype and device wanted.

    Returns:
        [S, width + R], and the low-rank product [S, R], a tensor of its own; None without adapter.
    """
    rank = 0 if low_rank is None else low_rank.rank
    both = like.new_empty(len(rows.order), width + rank)
    factor = both[:, :width]
    fill(factor)
    if low_rank is None:
        return both, None
    low = F.grouped_mm(factor, low_rank.to(like.dtype).transpose(1, 2), offs=rows.ends)
    both[:, width:] = low
    return both, low


def with_low_rank(factor: Tensor, low_rank: Tensor | None) -> Tensor:
    """The factor and the columns after it as one tensor, as `beside_low_rank` has laid them out."""
    rank = 0 if low_rank is None else low_rank.shape[1]
    shape = factor.shape[0], factor.shape[1] + rank
    return factor.as_strided(shape, factor.stride(), factor.storage_offset())


def product(
    input_SK: Tensor, weight: ExpertWeight, extra: ExpertMatrix | None, sums_over_rows: bool, rows: RowOrder
) -> Tensor:
    """Each row of the input times the weight of its expert: [S, N].

    Args:
        input_SK: its columns are the dimension that is summed over, then those of the low-rank product.
        weight: the weights of all experts, [E, rows, columns].
        extra: what the columns of the low-rank product are multiplied by, of width N; None without adapter.
        sums_over_rows: whether the sum runs over the weight's rows (y = x W) or its columns (y = x W^T).
        rows: which rows belong to which expert.
    """
    _, num_rows, num_columns = weight.shape
    num_outputs = num_columns if sums_over_rows else num_rows
    if isinstance(weight, nn.Parameter) and extra is None:
        return F.grouped_mm(input_SK, weight if sums_over_rows else weight.transpose(1, 2), offs=rows.ends)
    width = slice_width(input_SK, len(rows.ends), num_outputs)
    if width >= num_outputs:
        factor = _factor(weight, extra, slice(0, num_outputs), sums_over_rows, input_SK)
        return F.grouped_mm(input_SK, factor, offs=rows.ends)
    y_SN = input_SK.new_empty(len(rows.order), num_outputs)
    for first in range(0, num_outputs, width):
        columns = slice(first, min(first + width, num_outputs))
        factor = _factor(weight, extra, columns, sums_over_rows, input_SK)
        y_SN[:, columns] = F.grouped_mm(input_SK, factor, offs=rows.ends)
        del factor
    return y_SN


def slice_width(input_SK: Tensor, num_experts: int, num_outputs: int) -> int:
    """How many of a product's columns are made at a time, in slices that are about equal."""
    column_bytes = num_experts * input_SK.shape[1] * input_SK.dtype.itemsize
    row_bytes = (input_SK.shape[1] + num_outputs) * input_SK.dtype.itemsize
    most_bytes = min(MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, SLICE_FOR_ROWS * input_SK.shape[0] * row_bytes))
    num_slices = -(num_outputs * column_bytes // -most_bytes)
    return -(num_outputs // -(num_slices * COLUMNS_MULTIPLE)) * COLUMNS_MULTIPLE


def _factor(
    weight: ExpertWeight, extra: ExpertMatrix | None, columns: slice, sums_over_rows: bool, like: Tensor
) -> Tensor:
    """The weights of some columns of a product with those of the low-rank product: [E, K + R, n] in `like`'s dtype."""
    num_experts, num_rows, num_columns = weight.shape
    rank = 0 if extra is None else extra.rank
    first = columns.start
    size = columns.stop - first
    first_row = 0
    first_column = 0
    if sums_over_rows:
        both = like.new_empty(num_experts, num_rows + rank, size)
        target = both[:, :num_rows]
        first_column = first
    else:
        both = like.new_empty(num_experts, size, num_columns + rank)
        target = both[:, :, :num_columns]
        first_row = first
    if isinstance(weight, QuantizedExpertWeight):
        weight.fill(target, first_row, first_column)
    else:
        target.copy_(weight[:, first_row : first_row + target.shape[1], first_column : first_column + target.shape[2]])
    factor = both if sums_over_rows else both.transpose(1, 2)
    if extra is not None:
        extra.fill(factor[:, -rank:], first)
    return factor
