"""The rows of a stored weight that this rank has, as a weight of their own. No codes are copied."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.quantized.format import Format, dynamic_map
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight
from qlora_fsdp.runtime.rows import gather_whole, local_rows, local_tensor


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
