"""What a model computes in a step: quantized layers, adapters, attention, norms and the loss."""

from qlora_fsdp.layers.quantized_embedding import QuantizedEmbedding
from qlora_fsdp.layers.quantized_format import Format, parse_storage
from qlora_fsdp.layers.quantized_linear import QuantizedLinear

QuantizedLayer = QuantizedLinear | QuantizedEmbedding  # works with isinstance too

__all__ = ["Format", "QuantizedEmbedding", "QuantizedLayer", "QuantizedLinear", "parse_storage"]
