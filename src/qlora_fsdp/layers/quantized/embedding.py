"""An embedding table stored as int8 codes with one scale per row. Only rows that are looked up are dequantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight


class QuantizedEmbedding(StoredWeight, nn.Embedding):  # type: ignore[override]  # `weight` is read-only
    """A frozen embedding table on meta with a `StoredWeight`, like an int8 `QuantizedLinear` of the same shape.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        format: int8.
        dtype: the compute dtype, in which rows are returned.
    """

    bias = padding_idx = None

    def __init__(self, num_embeddings: int, embedding_dim: int, format: Format, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would allocate the table
        assert format.quant_type == "int8"
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._make_parts(num_embeddings, embedding_dim, format, dtype, "meta")

    def forward(self, input: Tensor) -> Tensor:
        """ids_BL, int64 -> x_BLD in the compute dtype."""
        index = input.flatten()
        return self.dequantize_rows(self.codes[index], self.scales[index]).view(*input.shape, self.embedding_dim)

    def dequantize_rows(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows [N, embedding_dim] in the compute dtype, of their codes and scales."""
        rows = {"codes": codes, "scales": scales}
        return self.format.dequantize(rows, len(scales), self.embedding_dim, self.compute_dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format.quant_type}"
