"""An embedding table stored as int8 codes with one scale per row. Only rows that are looked up are dequantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized_format import Format


class QuantizedEmbedding(nn.Embedding):
    """A frozen embedding table stored as `codes` and `scales`, like an int8 `QuantizedLinear` of the same shape.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        format: int8.
        dtype: the compute dtype, in which rows are returned.
        device: where the Parameters are made; usually meta.

    Attributes:
        part_names: names of the Parameters that stand for the table.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter  # only 4-bit formats have them
    bias = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's own would allocate the table
        assert format.quant_type == "int8"
        self.num_embeddings, self.embedding_dim = self.out_features, self.in_features = num_embeddings, embedding_dim
        self.format, self.compute_dtype = format, dtype
        parts = format.parts(num_embeddings, embedding_dim)
        self.part_names = list(parts)
        for name, (shape, part_dtype) in parts.items():
            tensor = torch.empty(shape, dtype=part_dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """The Parameters that stand for the table, in the order of `part_names`."""
        return [self.codes, self.scales]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The table [num_embeddings, embedding_dim] in the compute dtype, dequantized anew at each access."""
        parts = {"codes": self.codes, "scales": self.scales}
        return self.format.dequantize(parts, self.num_embeddings, self.embedding_dim, self.compute_dtype)

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
