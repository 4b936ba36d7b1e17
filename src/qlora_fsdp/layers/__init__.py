"""What a model computes in a step: quantized layers, adapters, attention, norms and the loss."""

from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedEmbedding, QuantizedLinear

QuantizedLayer = QuantizedLinear | QuantizedEmbedding | QuantizedExpertWeight  # works with isinstance too

__all__ = [
    "Format",
    "QuantizedEmbedding",
    "QuantizedExpertWeight",
    "QuantizedLayer",
    "QuantizedLinear",
]
