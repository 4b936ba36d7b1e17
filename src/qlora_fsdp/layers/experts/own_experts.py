"""The experts of a sharded layer that this rank has: each rank computes what its own add, and the ranks sum that.

FSDP splits the rows of all experts. If their number is a multiple of that of the ranks, each rank has whole experts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from qlora_fsdp.layers.experts.adapter import ExpertAdapter
from qlora_fsdp.layers.experts.forward import expert_weight_names, experts_forward
from qlora_fsdp.layers.experts.weights import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.own_rows import fill_parts, own_parts
from qlora_fsdp.runtime.rows import gather_whole, local_tensor


class OwnExperts:
    """The forward of a module of fused experts, or of its adapters, whose weights are sharded. Collective.

    Args:
        experts: transformers' module. Its number of experts is a multiple of the number of ranks.
        adapters: by the name of the weight that each adapts.
        group: the ranks that share the weights.
    """

    def __init__(self, experts: nn.Module, adapters: dict[str, ExpertAdapter], group: dist.ProcessGroup) -> None:
        self.group, self.adapters = group, adapters
        self.num_all = num_experts(experts)
        self.num = self.num_all // dist.get_world_size(group)
        self.first = dist.get_rank(group) * self.num
        # A module of its own class, whose methods are asked for its activation, with other weights.
        self.own: Any = copy.copy(experts)
        self.own._parameters, self.own._modules = dict(experts._parameters), dict(experts._modules)
        for name, param in experts.named_parameters(recurse=False):
            self.own._parameters[name] = nn.Parameter(local_tensor(param), requires_grad=False)
        for name, weight in experts.named_children():
            if isinstance(weight, QuantizedExpertWeight):
                self.own._modules[name] = self._own_weight(weight)
        self.own_adapters = {name: self._own_adapter(adapter) for name, adapter in adapters.items()}

    def _own_weight(self, weight: QuantizedExpertWeight) -> QuantizedExpertWeight:
        format, parts = own_parts(weight)
        own = QuantizedExpertWeight((self.num, *weight.shape[1:]), format, weight.compute_dtype)
        fill_parts(own, parts)
        return own

    def _own_adapter(self, adapter: ExpertAdapter) -> ExpertAdapter:
        """An adapter of the own experts. Its B is made by `refresh`."""
        a = local_tensor(adapter.lora_a.weight)
        num_outputs, width = adapter.lora_b.weight.shape
        lora_a, lora_b = nn.Linear(a.shape[1], len(a), device="meta"), nn.Linear(width, num_outputs, device="meta")
        lora_a.weight = nn.Parameter(a, requires_grad=False)
        shape = num_outputs, width // self.num_all * self.num
        lora_b.weight = nn.Parameter(a.new_empty(shape), requires_grad=False)
        return adapter._replace(lora_a=lora_a, lora_b=lora_b)

    def refresh(self) -> None:
        """Take the adapters as they are now. Collective."""
        for name, adapter in self.adapters.items():
            own = self.own_adapters[name].lora_b.weight
            whole = gather_whole(adapter.lora_b.weight, own.device)  # of each rank of the adapter, expert by expert
            some = whole.unflatten(1, (-1, self.num_all))[:, :, self.first : self.first + self.num]
            own.data.copy_(some.flatten(1))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x_TH, each token's experts [T, K] and their weights [T, K] -> y_TH, of all ranks' experts."""
        index = top_k_index - self.first
        is_own = (index >= 0) & (index < self.num)
        # What other ranks have goes to an expert of this one, and adds nothing.
        index, weights = index.where(is_own, 0), top_k_weights.where(is_own, 0)
        y_TH = experts_forward(self.own, hidden_states, index, weights, self.own_adapters)
        dist.all_reduce(y_TH, group=self.group)
        return y_TH


def num_experts(experts: nn.Module) -> int:
    """How many experts a module of fused experts has."""
    weight: Tensor | QuantizedExpertWeight = getattr(experts, expert_weight_names(experts)[0])
    return weight.shape[0]
