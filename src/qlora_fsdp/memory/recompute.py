"""Give every transformer layer its activation policy. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from qlora_fsdp.memory.activations import Policy
from qlora_fsdp.memory.offload import InputOffload
from qlora_fsdp.quantized.fuse import remake_norms


def set_activation_policy(layers: Sequence[nn.Module], policies: Sequence[Policy]) -> None:
    """Have each layer keep, recompute or offload its activations while it trains.

    Non-reentrant checkpointing (torch.utils.checkpoint): inputs need not require gradients, so no hook on the
    embeddings is needed for 'element 0 of tensors does not require grad' not to happen.

    Args:
        layers: transformers' `GradientCheckpointingLayer`s, in order.
        policies: one a layer.
    """
    recompute = partial(checkpoint, use_reentrant=False)
    offload = InputOffload()
    for layer, policy in zip(layers, policies, strict=True):
        if policy is not Policy.none:
            remake_norms(layer)
        layer.gradient_checkpointing = policy in (Policy.full, Policy.offload)  # type: ignore[assignment]
        if policy is Policy.full:
            layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]
        elif policy is Policy.offload:
            layer._gradient_checkpointing_func = partial(offload.run, recompute)  # type: ignore[assignment]
