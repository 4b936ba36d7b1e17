"""What stores a weight in a quantized format: a linear layer, a table of embeddings, or the weights of experts."""

from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.linear import QuantizedEmbedding, QuantizedLinear

QuantizedLayer = QuantizedLinear | QuantizedEmbedding | QuantizedExpertWeight  # works with isinstance too
