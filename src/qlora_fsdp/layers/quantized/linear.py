"""A linear layer whose weight is stored quantized, as codes and scales, and dequantized each time it is used.

The rows of a stored weight that this rank has, as a weight of their own. No codes are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map
from qlora_fsdp.layers.quantized.matmul import FP8_MAX, Axis, DequantizedMatmul, Matmul
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight
from qlora_fsdp.runtime.rows import gather_whole, local_rows, local_tensor


class QuantizedLinear(StoredWeight, nn.Linear):
    """A frozen linear layer with a `StoredWeight`.

    Args:
        in_features: a multiple of the block size for 4-bit formats.
        out_features: the number of outputs; the weight has as many rows.
        bias: whether there is a bias. It is not quantized, and is kept in `dtype`.
        format: how the weight is quantized.
        dtype: the compute dtype: of the dequantized weight, the input and the output.
        device: where the Parameters are made; usually meta.

    Attributes:
        matmul: computes products with the weight. One call may compute several layers that have the same input, such
            as q, k and v, if all of them have the same kind of `Matmul`.
        reader: what dequantizes the weight where it is read; None for the layer itself (weight_reader.py).
        replaces: the class of the model's own layer, in whose place this one is.
    """

    matmul: Matmul = DequantizedMatmul()
    reader: Callable[[QuantizedLinear], Tensor] | None = None
    replaces: type[nn.Module] = nn.Linear
    _fp8_scales: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        format: Format,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        nn.Module.__init__(self)  # and not nn.Linear's, which would allocate the whole weight
        assert format.why_not(in_features) is None
        self._make_parts(out_features, in_features, format, dtype, device)
        self.blocksize = format.blocksize
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None,
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W_OI in the compute dtype: dequantized anew at each access, unless a `reader` has it."""
        return self.dequantize() if self.reader is None else self.reader(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the dequantized weight."""
        return self.out_features * self.in_features * self.compute_dtype.itemsize

    @property
    def dequantized_bytes(self) -> int:
        """Bytes that the dequantized weight takes, with the scales that are made on the way."""
        num_scales = self.out_features * (self.in_features // self.blocksize) if self.format.double_quant else 0
        return self.weight_bytes + 4 * num_scales

    def absmax(self) -> Tensor:
        """The scales of a 4-bit weight: float32 [out_features, blocks]."""
        return self.format.dequantize_scales(self.named_parts(), self.out_features, self.in_features)

    def fp8_scales(self) -> tuple[Tensor, Tensor]:
        """The fp8 scales of a 4-bit weight, which can be scaled in two ways.

        Forward has one scale for each row: weight = fp8 value * row scale. Backward multiplies by the transposed
        weight, and has one scale for each column of blocks: weight = fp8 value * column scale. In either product the
        scale is constant along the dimension that is summed over, so it can be applied to the sum.

        No weight of a block is larger than the block's absmax. So the largest absmax of a row, or of a column of
        blocks, divided by the largest fp8 value, is a scale with which no weight overflows. The weight is frozen, so
        the scales are computed once.

        Returns:
            The row scales, float32 [out_features], and the column scales, float32 [blocks].
        """
        if self._fp8_scales is None:
            absmax = self.absmax().abs() / FP8_MAX  # a scale that was quantized itself may come out just below 0
            self._fp8_scales = (absmax.amax(1).clamp_min_(1e-12), absmax.amax(0).clamp_min_(1e-12))
        return self._fp8_scales

    def fill_fp8(self, factors: Tensor, out: Tensor, axis: Axis) -> None:
        """Write a 4-bit weight times `factors` (the reciprocals of fp8 scales) into `out`; on a GPU.

        Args:
            factors: float32 [out_features] for axis "row", [blocks] for axis "column".
            out: float8_e4m3fn [out_features, in_features] for axis "row", transposed for axis "column".
            axis: "row": one factor per row; "column": one per column of blocks.
        """
        from qlora_fsdp.layers.kernels import triton_dequantize

        codes, scales = self.codes, self.scales
        nested = self.nested_scales if self.format.double_quant else None
        books = code_book(self.format.quant_type, codes.device), dynamic_map(codes.device)
        triton_dequantize.dequantize(codes, scales, nested, books, self.blocksize, out, factors, axis)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the dtype of the input, which must be the compute dtype."""
        return _DequantizedLinear.apply(input, self.bias, self)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format.quant_type}, double_quant={self.format.double_quant}"


class _DequantizedLinear(torch.autograd.Function):
    """y = x W^T + b. The weight is dequantized for forward, and again for backward.

    Autograd saves nothing between the two, not even the codes: backward reads them from the layer, which FSDP has
    gathered again by then. This also shortens activation checkpointing. `torch.utils.checkpoint` recomputes a
    transformer layer only up to the last tensor that it saved. So a linear layer that comes last and saves nothing is
    not computed again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        # The layer adds the bias itself. `bias` is an argument only so that autograd asks for its gradient.
        ctx.layer = layer
        # N tokens, O output features
        (y_NO,) = layer.matmul.outputs(x.reshape(-1, x.shape[-1]), [layer])
        return unflatten(y_NO, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        # The constructor freezes the bias. It needs a gradient only if it was made trainable since.
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = ctx.layer.matmul.input_grad([grad.reshape(-1, grad.shape[-1])], [ctx.layer])
        return grad_x.view(*grad.shape[:-1], ctx.layer.in_features), grad_bias, None


def unflatten(y_NO: Tensor, x: Tensor) -> Tensor:
    """y [N, O] with the leading dimensions of x, but not as a view.

    Autograd forbids changing in place a view that a custom function returned, and Longformer does this to its queries.
    """
    y: Tensor = torch.ops.aten._unsafe_view.default(y_NO, [*x.shape[:-1], y_NO.shape[1]])
    return y


class QuantizedEmbedding(StoredWeight, nn.Embedding):  # type: ignore[override]  # `weight` is read-only
    """A frozen embedding table on meta with a `StoredWeight`, like an int8 `QuantizedLinear` of the same shape.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        format: int8.
        dtype: the compute dtype, in which rows are returned.
        lookup: the module that had the table, if it does more than look rows up: Gemma's scales them. Its forward gets
            the rows of a batch for its table. It loses its weight here.
    """

    bias = None
    padding_idx: int | None = None  # of a table of tokens: the column of a LoRA that is not trained

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format,
        dtype: torch.dtype,
        lookup: nn.Embedding | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would allocate the table
        assert format.quant_type == "int8"
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._make_parts(num_embeddings, embedding_dim, format, dtype, "meta")
        if lookup is not None:
            del lookup.weight
            lookup.padding_idx = None  # which is a row of the whole table
        self.lookup = lookup

    def forward(self, input: Tensor) -> Tensor:
        """ids_BL, int64 -> x_BLD in the compute dtype."""
        index = input.flatten()
        rows = self.dequantize_rows(self.codes[index], self.scales[index])
        if self.lookup is None:
            return rows.view(*input.shape, self.embedding_dim)
        ids = torch.arange(len(rows), device=rows.device).view(input.shape)
        with replaced([(self.lookup, "weight", rows)]):
            x: Tensor = self.lookup(ids)
        return x

    def dequantize_rows(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows [N, embedding_dim] in the compute dtype, of their codes and scales."""
        rows = {"codes": codes, "scales": scales}
        return self.format.dequantize(rows, len(scales), self.embedding_dim, self.compute_dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format.quant_type}"


def own_rows(layer: QuantizedLinear) -> QuantizedLinear:
    """A layer with those outputs that this rank's rows of the weight give; the layer itself if it is whole here.

    Collective if the layer is sharded.
    """
    if not isinstance(layer.codes, DTensor):
        return layer
    first, last = local_rows(layer.codes)
    format, parts = own_parts(layer)
    own = QuantizedLinear(layer.in_features, last - first, layer.bias is not None, format, layer.compute_dtype)
    fill_parts(own, parts)
    if layer.bias is not None:
        own.bias = nn.Parameter(local_tensor(layer.bias), requires_grad=False)
    return own


def fill_parts(weight: StoredWeight, parts: dict[str, Tensor]) -> None:
    """Put codes and scales in the place of those on meta."""
    for name, part in parts.items():
        weight.register_parameter(name, nn.Parameter(part, requires_grad=False))


@torch.no_grad()
def own_parts(weight: StoredWeight) -> tuple[Format, dict[str, Tensor]]:
    """The codes and scales of this rank's rows of a sharded weight, and how they are stored. Collective.

    Double quantization counts blocks of scales across rows. If one of them began in the rows of the rank before, the
    scales are dequantized, and the format is one without double quantization.
    """
    format = weight.format
    parts = {name: local_tensor(part) for name, part in weight.named_parts().items()}
    if not format.double_quant:
        return format, parts
    nested = gather_whole(weight.nested_scales, parts["codes"].device)
    num_blocks = weight.in_features // format.blocksize
    first, last = (row * num_blocks for row in local_rows(weight.codes))
    if first % NESTED_BLOCKSIZE == 0:
        groups = nested[first // NESTED_BLOCKSIZE : -(last // -NESTED_BLOCKSIZE)]
        return format, {**parts, "nested_scales": torch.cat([groups, nested[-1:]])}
    codes = format.unpack(parts["scales"], num_blocks).long()
    group = torch.arange(first, last, device=codes.device).view(codes.shape) // NESTED_BLOCKSIZE
    scales = dynamic_map(codes.device)[codes] * nested[group] + nested[-1]
    return replace(format, double_quant=False), {"codes": parts["codes"], "scales": scales}
