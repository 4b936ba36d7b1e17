"""What all quantized layers share: a weight that is stored as codes and scales, and dequantized each time it is used.

Codes are the weight's values as small integers; scales say what a block of these integers stands for.

bitsandbytes keeps codes in a Parameter class of its own, which has the scales as an attribute. Under FSDP2 that fails
twice: it does not shard the attribute, so every rank would keep all scales, and what it gathers are plain Parameters,
which lack the attribute. So here codes and scales are plain Parameters side by side, and the layer computes the weight
from them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map

if TYPE_CHECKING:
    from qlora_fsdp.layers.kernels.triton_products import WeightCodes


class StoredWeight(nn.Module):
    """A module with a frozen weight, stored as `codes` and `scales`.

    With double quantization it also has `nested_scales`, and in nvfp4 `global_scales`.

    `Format` describes their contents. FSDP2 splits dim 0 of each over ranks.

    Attributes:
        part_names: names of the Parameters that make up the weight.
        format: how the weight is quantized.
        compute_dtype: the dtype of the dequantized weight.
        out_features: rows of the weight.
        in_features: columns of the weight.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter
    global_scales: nn.Parameter

    def _make_parts(
        self, out_features: int, in_features: int, format: Format, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Set the attributes, and make the Parameters without values; `device` is usually meta."""
        self.out_features = out_features
        self.in_features = in_features
        self.format = format
        self.compute_dtype = dtype
        parts = format.parts(out_features, in_features)
        self.part_names = list(parts)
        for name, (shape, part_dtype) in parts.items():
            tensor = torch.empty(shape, dtype=part_dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """The Parameters that make up the weight, in the order of `part_names`."""
        return [getattr(self, name) for name in self.part_names]

    def named_parts(self) -> dict[str, Tensor]:
        """The same by their names."""
        return {name: getattr(self, name) for name in self.part_names}

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features] in the compute dtype, dequantized anew at each access.

        It is a property, so that code which reads `layer.weight` gets a weight, and never codes.
        """
        return self.dequantize()

    def dequantize(self) -> Tensor:
        """The weight [out_features, in_features] in the compute dtype, as the current stream computes it."""
        return self.format.dequantize(self.named_parts(), self.out_features, self.in_features, self.compute_dtype)


def weight_codes(layer: StoredWeight, bias: Tensor | None) -> WeightCodes:
    """A layer's weight as the kernel of products with codes reads it (kernels/triton_products.py).

    Args:
        layer: has the weight.
        bias: [rows], or None.
    """
    from qlora_fsdp.layers.kernels.triton_products import WeightCodes

    format = layer.format
    codes = layer.codes.detach()
    scales = layer.scales.detach()
    if not format.is_4bit:
        return WeightCodes(codes.view(torch.int8), scales, None, bias)
    nested: Tensor | None = None
    if not format.is_bitsandbytes:
        scales = scales.view(format.scale_dtype)
    if format.double_quant:
        scales = scales.view(torch.uint8)
        nested = layer.nested_scales
    return WeightCodes(codes.view(torch.uint8), scales, nested, bias)


@cache
def code_values(format: Format) -> tuple[float, ...]:
    """The values of the 16 codes; () for int8."""
    return tuple(code_book(format.quant_type, torch.device("cpu")).tolist()) if format.is_4bit else ()


@cache
def code_books(format: Format, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the kernel reads of the values of codes, and of quantized scales: float32 [16] and [256]."""
    from qlora_fsdp.layers.kernels.triton_products import scaled

    values = scaled(code_values(format), dtype) if format.is_4bit else (0.0,) * 16
    return torch.tensor(values, dtype=torch.float32).to(device), dynamic_map(device)
