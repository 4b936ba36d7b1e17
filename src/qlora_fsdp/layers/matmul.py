"""How products with a quantized weight are computed: dequantized to the compute dtype, or in fp8.

A `Matmul` takes the layers that share an input together, so that what is done to the input is done once.

Shapes: x_NI, W_OI, y_NO, with O summed over the layers of a group; h_NR, b_RO of an adapter of rank R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qlora_fsdp.layers.quantized_linear import QuantizedLinear

FP8_MAX = 448.0  # of torch.float8_e4m3fn
FP8_MAX_BLOCKSIZE = 256  # larger tiles would not fit a multiprocessor when they are transposed
FP8_MULTIPLE = 16  # of every dimension of an fp8 product but the first


@dataclass(frozen=True)
class Addend:
    """h b, that is added to a large product."""

    h_NR: Tensor
    b_RO: Tensor

    def alone(self, bias: Tensor | None = None) -> Tensor:
        """h b + bias, a new tensor [N, O]."""
        return self.h_NR @ self.b_RO if bias is None else torch.addmm(bias, self.h_NR, self.b_RO)

    def add_to(self, y_NO: Tensor) -> Tensor:
        """y + h b, in place."""
        return y_NO.addmm_(self.h_NR, self.b_RO)


class Matmul(Protocol):
    """Products of a group of layers that share an input. None of them keeps anything."""

    def outputs(
        self, x_NI: Tensor, layers: Sequence[QuantizedLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, and its addend; each contiguous."""

    def joint_output(self, x_NI: Tensor, layers: Sequence[QuantizedLinear]) -> Tensor:
        """x W^T of all layers side by side [N, O], without bias."""

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[QuantizedLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum over layers of grad W, and the addend [N, I]; a new tensor."""


class DequantizedMatmul:
    """A weight at a time is dequantized, used and dropped.

    The addend comes first, and the large product is added to it while it is made: half the traffic of the other order.
    Not so a residual, which is larger than both: what the adapter adds would round away in it before the product comes.
    """

    def outputs(
        self, x_NI: Tensor, layers: Sequence[QuantizedLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, and its addend."""
        if addends is None:
            return [torch.nn.functional.linear(x_NI, layer.weight, layer.bias) for layer in layers]
        outputs = [addend.alone(layer.bias) for addend, layer in zip(addends, layers, strict=True)]
        return [y_NO.addmm_(x_NI, layer.weight.t()) for y_NO, layer in zip(outputs, layers, strict=True)]

    def joint_output(self, x_NI: Tensor, layers: Sequence[QuantizedLinear]) -> Tensor:
        """x W^T of all layers side by side."""
        y_NO = x_NI.new_empty(x_NI.shape[0], sum(layer.out_features for layer in layers))
        for part, layer in zip(y_NO.split([layer.out_features for layer in layers], 1), layers, strict=True):
            torch.mm(x_NI, layer.weight.t(), out=part)
        return y_NO

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[QuantizedLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum over layers of grad W, and the addend."""
        total = None if addend is None else addend.alone()
        for grad, layer in zip(grads, layers, strict=True):
            total = grad @ layer.weight if total is None else total.addmm_(grad, layer.weight)
        assert total is not None
        return total


class Fp8Matmul:
    """Both factors in float8_e4m3fn, with a scale for each row of the input and each output (or input) feature.

    Products are summed in fp32 and returned in the compute dtype. In backward a scale covers a block of columns, so
    that it comes from the scales of the codes alone. The scales of a frozen weight never change: each layer keeps
    them, 4 bytes a row and a few hundred more.
    """

    def outputs(
        self, x_NI: Tensor, layers: Sequence[QuantizedLinear], addends: Sequence[Addend] | None = None
    ) -> list[Tensor]:
        """x W^T + b of each layer, and its addend."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        x8, scales = quantize_rows(x_NI)
        outputs = []
        for layer in layers:
            y_NO = _scaled_mm(x8, scales, *_weight_fp8([layer], "row"), x_NI.dtype)
            outputs.append(y_NO if layer.bias is None else y_NO.add_(layer.bias))
        if addends is not None:
            outputs = [addend.add_to(y_NO) for addend, y_NO in zip(addends, outputs, strict=True)]
        return outputs

    def joint_output(self, x_NI: Tensor, layers: Sequence[QuantizedLinear]) -> Tensor:
        """x W^T of all layers side by side."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        return _scaled_mm(*quantize_rows(x_NI), *_weight_fp8(layers, "row"), x_NI.dtype)

    def input_grad(
        self, grads: Sequence[Tensor], layers: Sequence[QuantizedLinear], addend: Addend | None = None
    ) -> Tensor:
        """The sum over layers of grad W, and the addend."""
        from qlora_fsdp.layers.kernels.triton_dequantize import quantize_rows

        total = _scaled_mm(*quantize_rows(_side_by_side(grads)), *_weight_fp8(layers, "column"), grads[0].dtype)
        return total if addend is None else addend.add_to(total)


def _scaled_mm(a_NK: Tensor, a_scales: Tensor, b_MK: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T [N, M]; scales fp32 [N, 1] and [1, M]."""
    return torch._scaled_mm(a_NK, b_MK.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=True)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """[N, sum of columns]; no copy where they lie so already."""
    if len(tensors) == 1:
        return tensors[0] if tensors[0].stride(1) == 1 else tensors[0].contiguous()
    first, width, offset = tensors[0], tensors[0].stride(0), tensors[0].storage_offset()
    for tensor in tensors:
        same_storage = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or tensor.stride(0) != width or tensor.storage_offset() != offset:
            return torch.cat(list(tensors), 1)
        offset += tensor.shape[1]
    return first.as_strided((first.shape[0], offset - first.storage_offset()), first.stride(), first.storage_offset())


def _weight_fp8(layers: Sequence[QuantizedLinear], axis: str) -> tuple[Tensor, Tensor]:
    """The weights joined along O, in fp8: [O, I] for axis "row", [I, O] for "column"; and their scales [1, rows]."""
    from qlora_fsdp.layers.kernels.triton_dequantize import dequantize_fp8

    num_rows, in_features = sum(layer.out_features for layer in layers), layers[0].in_features
    device = layers[0].codes.device
    if axis == "row":
        out = torch.empty(num_rows, in_features, dtype=torch.float8_e4m3fn, device=device)
        parts = out.split([layer.out_features for layer in layers])
        scales = [layer.fp8_scales()[0] for layer in layers]
    else:
        out = torch.empty(in_features, num_rows, dtype=torch.float8_e4m3fn, device=device)
        parts = out.split([layer.out_features for layer in layers], 1)
        shared = layers[0].fp8_scales()[1]
        for layer in layers[1:]:
            shared = torch.maximum(shared, layer.fp8_scales()[1])
        scales = [shared] * len(layers)
    for part, layer, scale in zip(parts, layers, scales, strict=True):
        nested = layer.nested_scales if layer.format.double_quant else None
        dequantize_fp8(layer.format, layer.codes, layer.scales, nested, scale.reciprocal(), part, axis)
    if axis == "row":
        return out, torch.cat(scales).unsqueeze(0)
    return out, scales[0].repeat_interleave(layers[0].format.blocksize).unsqueeze(0)
