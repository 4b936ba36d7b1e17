"""What a run will compute and hold, counted on a model on meta, before anything large is allocated: FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from qlora_fsdp.layers import QuantizedLayer, QuantizedLinear
from qlora_fsdp.layers.attention import head_dim
from qlora_fsdp.runtime.rows import rows_of_rank


@dataclass(frozen=True)
class FlopCounter:
    """Model FLOPs of a training step, recomputation not counted (PaLM's MFU, arXiv:2204.02311, appendix B).

    Attributes:
        frozen_weights: elements of frozen matrices: 2 FLOPs forward and 2 for the input's gradient, each.
        trained_weights: elements of trained matrices: 2 more for the weight's gradient.
        attention_width: sum over layers of heads x head size.
    """

    frozen_weights: int
    trained_weights: int
    attention_width: int

    def of_batch(self, sequence_starts: Tensor) -> float:
        """FLOPs of a micro-batch whose rows start there (int32 [rows + 1], on the CPU); attention is causal."""
        lengths = sequence_starts.diff().double()
        dense = (4 * self.frozen_weights + 6 * self.trained_weights) * float(lengths.sum())
        return dense + 6 * self.attention_width * float((lengths**2).sum())


def count_flops(model: nn.Module, config: PretrainedConfig) -> FlopCounter:
    """The counter of a model on meta, adapters included; embeddings are look-ups and do not count."""
    frozen = trained = 0
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            frozen += module.in_features * module.out_features
        elif isinstance(module, nn.Linear):
            if module.weight.requires_grad:
                trained += module.weight.numel()
            else:
                frozen += module.weight.numel()
    num_heads = getattr(config, "num_attention_heads", 0) or 1
    return FlopCounter(frozen, trained, getattr(config, "num_hidden_layers", 0) * num_heads * head_dim(config))


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parameters: of the whole model, and of one rank's shard."""

    total_bytes: int
    shard_bytes: int
    num_trainable: int
    num_base: int


def count_bytes(model: nn.Module, shard_rank: int, num_shards: int) -> Sizes:
    """Sizes of a model on meta, before sharding."""
    total = shard = trainable = base = 0
    for param in model.parameters():
        row = param[0].numel() * param.dtype.itemsize if param.ndim else param.dtype.itemsize
        first, last = rows_of_rank(param.shape[0], shard_rank, num_shards)
        total += param.numel() * param.dtype.itemsize
        shard += (last - first) * row
        trainable += param.numel() if param.requires_grad else 0
    seen: set[int] = set()  # tied weights count once
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            base += module.in_features * module.out_features
            base += 0 if module.bias is None else module.bias.numel()
        else:
            plain = {id(p): p.numel() for p in module.parameters(recurse=False) if not p.requires_grad}
            base += sum(number for key, number in plain.items() if key not in seen)
            seen |= plain.keys()
    return Sizes(total, shard, trainable, base)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
