"""An embedding table stored as int8 codes with one scale per row. Only rows that are looked up are dequantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized_format import Format
from qlora_fsdp.layers.stored_weight import StoredWeight


class QuantizedEmbedding(StoredWeight, nn.Embedding):  # type: ignore[override]  # `weight` is read-only
    """A frozen embedding table on meta with a `StoredWeight`, like an int8 `QuantizedLinear` of the same shape.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        format: int8.
        dtype: the compute dtype, in which rows are returned.
    """

    bias = None

    def __init__(self, num_embeddings: int, embedding_dim: int, format: Format, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would allocate the table
        assert format.quant_type == "int8"
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._make_parts(num_embeddings, embedding_dim, format, dtype, "meta")

    def forward(self, input: Tensor) -> Tensor:
        """ids_BL, int64 -> x_BLD in the compute dtype."""
        return self.look_up(input, self.codes, self.scales)

    def look_up(self, ids: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Like `forward`, with codes and scales that the caller has gathered."""
        index = ids.flatten()
        rows = {"codes": codes.view(torch.uint8)[index], "scales": scales[index]}  # bytes, so that no value changes
        found = self.format.dequantize(rows, len(index), self.embedding_dim, self.compute_dtype)
        return found.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format.quant_type}"
