"""The weight of all experts of a layer in one tensor, stored as codes and scales.

transformers keeps the experts of a mixture-of-experts layer in single tensors of three dimensions: `gate_up_proj`
[E, 2I, H] and `down_proj` [E, H, I] (transposed in some models, such as gpt-oss). Quantization looks at one row at a
time, so such a tensor is quantized like the matrix of all its rows, [E * rows, columns]. The bytes are those that
bitsandbytes' `nn.parametrize.replace_parameter_4bit` makes of it. FSDP2 splits the rows over the ranks, wherever an
expert begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import StoredWeight


class QuantizedExpertWeight(StoredWeight):
    """One weight of all experts of a layer, as a `StoredWeight` with the rows of all experts.

    Args:
        shape: [E, rows, columns]; E experts.
        format: how the weight is quantized.
        dtype: the compute dtype, to which it is dequantized.
        device: where the Parameters are made; usually meta.
    """

    bias = None

    def __init__(
        self, shape: tuple[int, int, int], format: Format, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> None:
        super().__init__()
        assert format.why_not(shape[2]) is None
        self.shape = torch.Size(shape)
        self._make_parts(shape[0] * shape[1], shape[2], format, dtype, device)

    @property
    def weight(self) -> Tensor:
        """The weight [E, rows, columns] in the compute dtype, dequantized anew at each access."""
        return super().weight.view(self.shape)

    def fill(self, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Write some rows and columns of every expert into `out` [E, rows, columns], which may be strided.

        Args:
            out: its rows are those of each expert from `first_row` on.
            first_row: the first row to write of each expert.
            first_column: a multiple of 64. So is the number of columns.
        """
        self.format.dequantize_part(self.named_parts(), out, first_row, first_column)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format.quant_type}, double_quant={self.format.double_quant}"
