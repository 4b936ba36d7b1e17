"""What all quantized layers share: a weight that is stored as codes and scales, and dequantized each time it is used.

Codes are the weight's values as small integers; scales say what a block of these integers stands for.

bitsandbytes keeps codes in a Parameter class of its own, which has the scales as an attribute. Under FSDP2 that fails
twice: it does not shard the attribute, so every rank would keep all scales, and what it gathers are plain Parameters,
which lack the attribute. So here codes and scales are plain Parameters side by side, and the layer computes the weight
from them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.quantized.format import Format


class StoredWeight(nn.Module):
    """A module with a frozen weight, stored as `codes`, `scales` and, with double quantization, `nested_scales`.

    `Format` describes their contents. FSDP2 splits dim 0 of each over ranks.

    Attributes:
        part_names: names of the Parameters that make up the weight.
        format: how the weight is quantized.
        compute_dtype: the dtype of the dequantized weight.
        out_features: rows of the weight.
        in_features: columns of the weight.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter

    def _make_parts(
        self, out_features: int, in_features: int, format: Format, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Set the attributes, and make the Parameters without values; `device` is usually meta."""
        self.out_features = out_features
        self.in_features = in_features
        self.format = format
        self.compute_dtype = dtype
        parts = format.parts(out_features, in_features)
        self.part_names = list(parts)
        for name, (shape, part_dtype) in parts.items():
            tensor = torch.empty(shape, dtype=part_dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """The Parameters that make up the weight, in the order of `part_names`."""
        return [getattr(self, name) for name in self.part_names]

    def named_parts(self) -> dict[str, Tensor]:
        """The same by their names."""
        return {name: getattr(self, name) for name in self.part_names}

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features] in the compute dtype, dequantized anew at each access.

        It is a property, so that code which reads `layer.weight` gets a weight, and never codes.
        """
        return self.dequantize()

    def dequantize(self) -> Tensor:
        """The weight [out_features, in_features] in the compute dtype, as the current stream computes it."""
        return self.format.dequantize(self.named_parts(), self.out_features, self.in_features, self.compute_dtype)
