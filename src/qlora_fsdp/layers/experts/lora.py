"""PEFT's adapter of fused experts. Its forward never makes a weight of the low-rank products of all experts."""

from __future__ import annotations

from typing import cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from qlora_fsdp.layers.experts.adapter import ExpertAdapter
from qlora_fsdp.layers.experts.forward import experts_forward, sums_over_rows
from qlora_fsdp.layers.experts.weights import QuantizedExpertWeight


class ExpertLora(ParamWrapper):
    """The adapters of all experts, one for each, of one weight: PEFT's `lora.ParamWrapper` on fused experts.

    PEFT nests wrappers, one around another, if several weights of a module are adapted. The outermost is called, and
    computes the experts with the adapters of all. Parameters, names, saving and loading are PEFT's.
    """

    def get_param(self) -> Tensor:
        """The adapted weight; of a quantized one, a tensor on meta of its shape."""
        weight = getattr(self.get_base_layer(), self.parameter_name)
        if isinstance(weight, QuantizedExpertWeight):
            return torch.empty(weight.shape, dtype=weight.compute_dtype, device="meta")
        return cast(Tensor, weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH."""
        return experts_forward(self.get_base_layer(), hidden_states, top_k_index, top_k_weights, self.adapters())

    def adapters(self) -> dict[str, ExpertAdapter]:
        if self.disable_adapters:
            return {}
        (name,) = self.active_adapters
        experts = self.get_base_layer()
        is_swapped = sums_over_rows(experts) != experts.is_transposed
        found: dict[str, ExpertAdapter] = {}
        layer: nn.Module = self
        while isinstance(layer, ExpertLora):
            lora_a, lora_b = cast(nn.Linear, layer.lora_A[name]), cast(nn.Linear, layer.lora_B[name])
            found[layer.parameter_name] = ExpertAdapter(lora_a, lora_b, layer.scaling[name], is_swapped)
            layer = layer.base_layer
        return found

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's merge, which is refused on codes: there is no weight to add to. `qlora-fsdp merge` merges those."""
        if isinstance(getattr(self.get_base_layer(), self.parameter_name), QuantizedExpertWeight):
            raise NotImplementedError("a quantized base can't be merged in place: use qlora-fsdp merge")
        super().merge(safe_merge, adapter_names)
