"""Quantized weights, and linear layers that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from qlora_fsdp.layers.quantized.compressed import find_global_scale
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear


def quantize_whole(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """The parts of a whole weight [O, I]."""
    global_scale = find_global_scale(weight.float().abs().amax().view(1)) if format.has_global_scale else None
    codes, scales = format.quantize_rows(weight, global_scale)
    parts = {"codes": codes, "scales": scales}
    if format.double_quant:
        parts["scales"], parts["nested_scales"] = format.quantize_scales(scales)
    if global_scale is not None:
        parts["global_scales"] = global_scale.repeat(len(weight))
    return parts


def make_quantized(weight: Tensor, format: Format, bias: bool = False) -> QuantizedLinear:
    """A layer that holds this weight [O, I], in its dtype and on its device; a bias is random."""
    rows, columns = weight.shape
    layer = QuantizedLinear(columns, rows, bias, format, weight.dtype, device=weight.device)
    for name, value in quantize_whole(weight, format).items():
        getattr(layer, name).copy_(value)
    if layer.bias is not None:
        layer.bias.copy_(torch.randn_like(layer.bias))
    return layer
