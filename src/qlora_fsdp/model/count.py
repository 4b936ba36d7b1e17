"""Count what a run computes and holds, from the model on meta: FLOPs per step and bytes per rank."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PretrainedConfig

from qlora_fsdp.common.model_figures import head_sizes
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.experts.forward import expert_weight_names
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.model.experts import num_chosen
from qlora_fsdp.runtime.rows import rows_of_rank


@dataclass(frozen=True)
class FlopCounter:
    """Counts the model FLOPs of a step, without recomputation (PaLM's MFU, arXiv:2204.02311, appendix B).

    Attributes:
        frozen_weights: elements of frozen matrices that a token is multiplied by. Each takes 2 FLOPs per token in
            forward, and 2 for the gradient of the input.
        trained_weights: elements of trained matrices. Each takes 2 more for its own gradient.
        attention_width: heads x head size, summed over layers. Where values are narrower than keys, the mean of both.
    """

    frozen_weights: int
    trained_weights: int
    attention_width: int

    def of_batch(self, batch: Batch) -> float:
        """FLOPs of a micro-batch on the CPU with causal attention, of a slice its part. Padding does not count."""
        assert batch.num_tokens is not None
        starts, length = batch.sequence_starts, batch.whole_length
        lengths = starts.diff().double()
        lengths[starts[1:] % length == 0] -= length - batch.num_tokens  # the last row of a sequence has its padding
        dense = (4 * self.frozen_weights + 6 * self.trained_weights) * float(lengths.sum())
        return (dense + 6 * self.attention_width * float((lengths**2).sum())) / batch.num_slices


def count_flops(model: nn.Module, config: PretrainedConfig) -> FlopCounter:
    """The counter for a model on meta with its adapters. Embeddings are look-ups and do not count.

    A token is sent to a few of a layer's experts. So experts and their adapters count by the share that a token meets,
    and what all tokens pass through counts whole: attention, routers, shared experts.
    """
    frozen = trained = 0.0
    shares: dict[str, float] = {}  # of experts, by the start of their names
    for name, module in model.named_modules():
        keys = expert_weight_names(module)
        if keys:
            experts = re.sub(r"(\.base_layer)*$", "", name)
            weights = [getattr(module, key) for key in keys]
            num_experts, block = weights[0].shape[0], model.get_submodule(experts.rpartition(".")[0])
            shares[f"{experts}."] = (num_chosen(block, config) or num_experts) / num_experts
            frozen += shares[f"{experts}."] * sum(math.prod(weight.shape) for weight in weights)
            frozen += sum(_router_weights(child, num_experts) for child in block.modules())
    # A module that is trained in full computes in the place of its original.
    unused = [module.original_module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    originals = {id(module) for original in unused for module in original.modules()}
    for name, module in model.named_modules():
        if id(module) in originals:
            continue
        if isinstance(module, QuantizedLinear):
            frozen += module.in_features * module.out_features
        elif isinstance(module, nn.Linear):
            share = next((share for start, share in shares.items() if name.startswith(start)), 1)
            if module.weight.requires_grad:
                trained += share * module.weight.numel()
            else:
                frozen += share * module.weight.numel()
    width = sum(layer.num_heads * (layer.key_size + layer.value_size) for layer in head_sizes(config)) / 2
    return FlopCounter(round(frozen), round(trained), round(width))


def _router_weights(module: nn.Module, num_experts: int) -> int:
    """Elements of a router's matrix, which transformers keeps in a class of its own; 0 for other modules."""
    weight = None if isinstance(module, nn.Linear) else module._parameters.get("weight")
    return weight.numel() if weight is not None and weight.ndim == 2 and len(weight) == num_experts else 0


@dataclass(frozen=True)
class Sizes:
    """How large the model's parameters are.

    Attributes:
        shard_bytes: bytes of one rank's shard.
        num_trainable: number of trained parameters.
        num_base: number of the base's parameters, before quantization.
    """

    shard_bytes: int
    num_trainable: int
    num_base: int


def count_bytes(model: nn.Module, shard_rank: int, num_shards: int) -> Sizes:
    """Sizes of a model on meta, before sharding."""
    shard = 0
    trainable = 0
    for param in model.parameters():
        row = param[0].numel() * param.dtype.itemsize if param.ndim else param.dtype.itemsize
        first, last = rows_of_rank(param.shape[0], shard_rank, num_shards)
        shard += (last - first) * row
        if param.requires_grad:
            trainable += param.numel()
    return Sizes(shard, trainable, _count_base(model))


def _count_base(model: nn.Module) -> int:
    """Numbers in the frozen weights, however they are stored."""
    base = 0
    seen: set[int] = set()  # tied weights count once
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            base += module.in_features * module.out_features
            if module.bias is not None:
                base += module.bias.numel()
        else:
            plain = {id(p): p.numel() for p in module.parameters(recurse=False) if not p.requires_grad}
            base += sum(number for key, number in plain.items() if key not in seen)
            seen |= plain.keys()
    return base
