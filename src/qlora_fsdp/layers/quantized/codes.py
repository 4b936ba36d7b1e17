"""A stored weight as the kernel of products with codes reads it (kernels/triton_products.py)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qlora_fsdp.layers.quantized.format import Format, code_book, dynamic_map
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight

if TYPE_CHECKING:
    from qlora_fsdp.layers.kernels.triton_products import WeightCodes


def weight_codes(layer: StoredWeight, bias: Tensor | None) -> WeightCodes:
    """A layer's weight with a bias [rows], or with None."""
    from qlora_fsdp.layers.kernels.triton_products import WeightCodes

    format = layer.format
    codes = layer.codes.detach()
    scales = layer.scales.detach()
    if not format.is_4bit:
        return WeightCodes(codes.view(torch.int8), scales, None, bias)
    nested: Tensor | None = None
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
