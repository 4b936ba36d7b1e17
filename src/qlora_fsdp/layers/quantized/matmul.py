"""How products with a quantized weight are computed: dequantized to the compute dtype, or in fp8.

A `Matmul` takes all layers that share an input at once, so that work on the input is done once.

Shapes: x_NI, W_OI, y_NO, with O summed over the layers of a group; h_NR, b_RO of an adapter of rank R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

FP8_MAX = 448.0  # the largest value of torch.float8_e4m3fn
FP8_MAX_BLOCKSIZE = 256  # a transposed tile of larger blocks would not fit a multiprocessor
FP8_MULTIPLE = 16  # every dimension of an fp8 product but the first must be a multiple of this

Axis = Literal["row", "column"]


class FrozenLinear(Protocol):
    """The interface that a product needs of a layer. `QuantizedLinear` has it."""

    in_features: int
    out_features: int

    @property
    def bias(self) -> Tensor | None:
        """[O] in the compute dtype."""

    @property
    def weight(self) -> Tensor:
        """W_OI, dequantized to the compute dtype at each access."""

    @property
    def blocksize(self) -> int:
        """Consecutive weights of a row that share a scale; of a 4-bit weight."""

    def fp8_scales(self) -> tuple[Tensor, Tensor]:
        """The fp8 scales of a 4-bit weight: float32 [O] for its rows, and [blocks] for its columns of blocks."""

    def fill_fp8(self, factors: Tensor, out: Tensor, axis: Axis) -> None:
        """Write a 4-bit weight times `factors` into `out`: as it is for rows, transposed for columns."""


class Addend(NamedTuple):
    """A low-rank product h b that is added to a large product."""

    h_NR: Tensor
    b_RO: Tensor

    def alone(self, bias: Tensor | None = None) -> Tensor:
        """h b + bias, a new tensor [N, O]."""
        return self.h_NR @ self.b_RO if bias is None else torch.addmm(bias, self.h_NR, self.b_RO)

    def add_to(self, y_NO: Tensor) -> Tensor:
        """y + h b, in place."""
        return y_NO.addmm_(self.h_NR, self.b_RO)


class Matmul(Protocol):
    """Products of a group of layers that share an input. An implementation keeps no tensor between calls."""

    def outputs(
        self, x_NI: Tensor, layers: Sequence[FrozenLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, plus its addend; each result is contiguous."""

    def joint_output(self, x_NI: Tensor, layers: Sequence[FrozenLinear]) -> Tensor:
        """x W^T of all layers side by side [N, O], without bias."""

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[FrozenLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum of grad W over the layers, plus the addend: a new tensor [N, I]."""


class DequantizedMatmul:
    """Dequantizes one weight at a time, uses it and drops it.

    The addend is computed first, and the large product is added to it as the product is made. That takes half the
    memory traffic of the other order. A residual must not be added in this way: it is much larger than what an adapter
    adds, which would round away in it before the large product arrives.
    """

    def outputs(
        self, x_NI: Tensor, layers: Sequence[FrozenLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, plus its addend."""
        if addends is None:
            return [torch.nn.functional.linear(x_NI, layer.weight, layer.bias) for layer in layers]
        outputs = [addend.alone(layer.bias) for addend, layer in zip(addends, layers, strict=True)]
        return [y_NO.addmm_(x_NI, layer.weight.t()) for y_NO, layer in zip(outputs, layers, strict=True)]

    def joint_output(self, x_NI: Tensor, layers: Sequence[FrozenLinear]) -> Tensor:
        """x W^T of all layers side by side."""
        sizes = [layer.out_features for layer in layers]
        y_NO = x_NI.new_empty(x_NI.shape[0], sum(sizes))
        for part, layer in zip(y_NO.split(sizes, 1), layers, strict=True):
            torch.mm(x_NI, layer.weight.t(), out=part)
        return y_NO

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[FrozenLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum of grad W over the layers, plus the addend."""
        total = None if addend is None else addend.alone()
        for grad, layer in zip(grads, layers, strict=True):
            total = grad @ layer.weight if total is None else total.addmm_(grad, layer.weight)
        assert total is not None
        return total


class Fp8Matmul:
    """Multiplies in float8_e4m3fn. Products are summed in fp32 and returned in the compute dtype.

    An fp8 product takes one scale per row of each factor, that is, per token and per output feature in forward. In
    backward the sum runs over the output features, so the weight needs scales per input feature instead. One scale per
    block of columns is used there, because it follows from the stored scales without a look at the weights. The scales
    of a frozen weight never change, so each layer keeps them: 4 bytes per row, and a few hundred bytes more.
    """

    def outputs(
        self, x_NI: Tensor, layers: Sequence[FrozenLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, plus its addend."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        x8, scales = quantize_rows(x_NI)
        outputs = []
        for layer in layers:
            y_NO = _scaled_mm(x8, scales, *_weights_by_row([layer]), x_NI.dtype)
            outputs.append(y_NO if layer.bias is None else y_NO.add_(layer.bias))
        if addends is not None:
            outputs = [addend.add_to(y_NO) for addend, y_NO in zip(addends, outputs, strict=True)]
        return outputs

    def joint_output(self, x_NI: Tensor, layers: Sequence[FrozenLinear]) -> Tensor:
        """x W^T of all layers side by side."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        return _scaled_mm(*quantize_rows(x_NI), *_weights_by_row(layers), x_NI.dtype)

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[FrozenLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum of grad W over the layers, plus the addend."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        total = _scaled_mm(*quantize_rows(_side_by_side(grads)), *_weights_by_column(layers), grads[0].dtype)
        return total if addend is None else addend.add_to(total)


def _scaled_mm(a_NK: Tensor, a_scales: Tensor, b_MK: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T [N, M]; scales are fp32 [N, 1] and [1, M]."""
    return torch._scaled_mm(a_NK, b_MK.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=True)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors joined along columns [N, sum of columns], without a copy where they already lie so in memory."""
    if len(tensors) == 1:
        return tensors[0] if tensors[0].stride(1) == 1 else tensors[0].contiguous()
    first = tensors[0]
    start = first.storage_offset()
    offset = start
    for tensor in tensors:
        same_storage = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        is_next = tensor.stride(0) == first.stride(0) and tensor.storage_offset() == offset
        if not same_storage or not is_next:
            return torch.cat(list(tensors), 1)
        offset += tensor.shape[1]
    return first.as_strided((first.shape[0], offset - start), first.stride(), start)


def _weights_by_row(layers: Sequence[FrozenLinear]) -> tuple[Tensor, Tensor]:
    """The weights joined along O, in fp8 [O, I], and one scale per row, fp32 [1, O]."""
    sizes = [layer.out_features for layer in layers]
    scales = [layer.fp8_scales()[0] for layer in layers]
    out = torch.empty(sum(sizes), layers[0].in_features, dtype=torch.float8_e4m3fn, device=scales[0].device)
    for part, layer, scale in zip(out.split(sizes), layers, scales, strict=True):
        layer.fill_fp8(scale.reciprocal(), part, "row")
    return out, torch.cat(scales).unsqueeze(0)


def _weights_by_column(layers: Sequence[FrozenLinear]) -> tuple[Tensor, Tensor]:
    """The transposed weights joined along O, in fp8 [I, O], and one scale per row, fp32 [1, I], equal in a block."""
    sizes = [layer.out_features for layer in layers]
    scale = layers[0].fp8_scales()[1]
    for layer in layers[1:]:
        scale = torch.maximum(scale, layer.fp8_scales()[1])
    out = torch.empty(layers[0].in_features, sum(sizes), dtype=torch.float8_e4m3fn, device=scale.device)
    factors = scale.reciprocal()
    for part, layer in zip(out.split(sizes, 1), layers, strict=True):
        layer.fill_fp8(factors, part, "column")
    return out, scale.repeat_interleave(layers[0].blocksize).unsqueeze(0)
