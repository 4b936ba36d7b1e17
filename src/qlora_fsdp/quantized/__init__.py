"""The quantized linear layer: its codes and scales are Parameters, so FSDP2 shards them like any other weight."""

from qlora_fsdp.quantized.formats import Format, parse_storage
from qlora_fsdp.quantized.linear import QuantizedLinear

__all__ = ["Format", "QuantizedLinear", "parse_storage"]
