"""The weight of all experts of a layer in one tensor, stored as codes and scales.

transformers keeps the experts of a mixture-of-experts layer in single tensors of three dimensions: `gate_up_proj`
[E, 2I, H] and `down_proj` [E, H, I] (transposed in some models, such as gpt-oss). Quantization looks at one row at a
time, so such a tensor is quantized like the matrix of all its rows, [E * rows, columns]. The bytes are those that
bitsandbytes' `nn.parametrize.replace_parameter_4bit` makes of it. FSDP2 splits the rows over the ranks, wherever an
expert begins.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized_format import Format


class QuantizedExpertWeight(nn.Module):
    """One weight of all experts of a layer, frozen: `codes`, `scales` and, with double quantization, `nested_scales`.

    Args:
        shape: [E, rows, columns]; E experts.
        format: how the weight is quantized.
        dtype: the compute dtype, to which it is dequantized.
        device: where the Parameters are made; usually meta.

    Attributes:
        part_names: names of the Parameters that stand for the weight.
        out_features: rows of all experts together; the name that all quantized layers share.
        in_features: columns.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter
    bias = None

    def __init__(
        self, shape: tuple[int, int, int], format: Format, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> None:
        super().__init__()
        assert format.why_not(shape[2]) is None
        self.shape, self.format, self.compute_dtype = torch.Size(shape), format, dtype
        self.out_features, self.in_features = shape[0] * shape[1], shape[2]
        parts = format.parts(self.out_features, self.in_features)
        self.part_names = list(parts)
        for name, (part_shape, part_dtype) in parts.items():
            tensor = torch.empty(part_shape, dtype=part_dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """The Parameters that stand for the weight, in the order of `part_names`."""
        return [getattr(self, name) for name in self.part_names]

    @property
    def weight(self) -> Tensor:
        """The weight [E, rows, columns] in the compute dtype, dequantized anew at each access."""
        whole = self.format.dequantize(self._named_parts(), self.out_features, self.in_features, self.compute_dtype)
        return whole.view(self.shape)

    def fill(self, out: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Write some rows and columns of every expert into `out` [E, rows, columns], which may be strided.

        Args:
            out: its rows are those of each expert from `first_row` on.
            first_row: of an expert.
            first_column: a multiple of 64. So is the number of columns.
        """
        self.format.dequantize_part(self._named_parts(), out, first_row, first_column)

    def _named_parts(self) -> Mapping[str, Tensor]:
        return {name: getattr(self, name) for name in self.part_names}

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.format.quant_type}, double_quant={self.format.double_quant}"
