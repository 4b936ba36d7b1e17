"""An `Assignment` says which tensors of the files fill a weight. assign.py finds it, and fill.py carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qlora_fsdp.layers import QuantizedLayer
from qlora_fsdp.weights.composed import Stored, stored_tensors
from qlora_fsdp.weights.safetensors_files import StoredTensor


@dataclass(frozen=True)
class Assignment:
    """One weight of the model and where it comes from.

    Attributes:
        name: its name in the model, e.g. `model.layers.0.self_attn.q_proj.weight`.
        module: the module that holds it. The `weight` of a `QuantizedLayer` stands for the layer's codes and scales.
        attribute: the parameter's (or buffer's) name in the module.
        stored: the tensor in the files, in full precision or as int8 or packed codes, or what it is composed of there;
            None for a random weight.
        stored_parts: for a weight that is quantized in the files, the tensors of its other parts (`scales`,
            `nested_scales`).
        nested_offset: for a weight that is double-quantized in the files, the mean that was subtracted from its scales.
        copies: other keys under which the files hold the same values (of a tied table); these are not read.
    """

    name: str
    module: nn.Module
    attribute: str
    stored: Stored | None = None
    stored_parts: dict[str, StoredTensor] = field(default_factory=dict)
    nested_offset: float | None = None
    copies: tuple[str, ...] = ()

    @property
    def parameter(self) -> Tensor:
        """The tensor whose rows decide what this rank reads."""
        attribute = "codes" if self.is_quantized else self.attribute
        parameter = self.module._parameters.get(attribute)
        value = self.module._buffers[attribute] if parameter is None else parameter
        assert value is not None
        return value

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.module, QuantizedLayer) and self.attribute == "weight"

    @property
    def layer(self) -> QuantizedLayer:
        """The module of a weight that `is_quantized`."""
        assert isinstance(self.module, QuantizedLayer)
        return self.module

    @property
    def num_elements(self) -> int:
        return self.layer.out_features * self.layer.in_features if self.is_quantized else self.parameter.numel()

    @property
    def stored_tensors(self) -> list[StoredTensor]:
        """All tensors in the files that are read for it."""
        return [] if self.stored is None else [*stored_tensors(self.stored), *self.stored_parts.values()]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes to read for the whole weight; for a random one, what it would take in `dtype`."""
        if self.stored is None:
            return self.num_elements * dtype.itemsize
        return self.stored.num_bytes + sum(part.num_bytes for part in self.stored_parts.values())
