"""Quantized linear layers with weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear


def make_quantized(weight: Tensor, format: Format, bias: bool = False) -> QuantizedLinear:
    """A layer that holds this weight [O, I], in its dtype and on its device; a bias is random."""
    rows, columns = weight.shape
    layer = QuantizedLinear(columns, rows, bias, format, weight.dtype, device=weight.device)
    codes, scales = format.quantize_rows(weight)
    values = {"codes": codes, "scales": scales}
    if format.double_quant:
        values["scales"], values["nested_scales"] = format.quantize_scales(scales)
    for name, value in values.items():
        getattr(layer, name).copy_(value)
    if layer.bias is not None:
        layer.bias.copy_(torch.randn_like(layer.bias))
    return layer
