"""What a model computes in a step: quantized layers, adapters, attention, norms and the loss."""

from qlora_fsdp.layers.quantized_embedding import QuantizedEmbedding
from qlora_fsdp.layers.quantized_experts import QuantizedExpertWeight
from qlora_fsdp.layers.quantized_format import Format, parse_storage
from qlora_fsdp.layers.quantized_linear import QuantizedLinear

QuantizedLayer = QuantizedLinear | QuantizedEmbedding | QuantizedExpertWeight  # works with isinstance too

__all__ = [
    "Format",
    "QuantizedEmbedding",
    "QuantizedExpertWeight",
    "QuantizedLayer",
    "QuantizedLinear",
    "parse_storage",
]
