"""Quantized layers: their codes and scales are Parameters, so FSDP2 shards them like any other weight."""

from qlora_fsdp.layers.quantized_embedding import QuantizedEmbedding
from qlora_fsdp.layers.quantized_format import Format, parse_storage
from qlora_fsdp.layers.quantized_linear import QuantizedLinear

QuantizedLayer = QuantizedLinear | QuantizedEmbedding  # for isinstance, too

__all__ = ["Format", "QuantizedEmbedding", "QuantizedLayer", "QuantizedLinear", "parse_storage"]
