"""Give every transformer layer its activation policy, and a smaller one where memory is short. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from qlora_fsdp.layers.fuse import remake_norms
from qlora_fsdp.memory.activation_bytes import Policy
from qlora_fsdp.memory.choose import describe_policies, next_smaller
from qlora_fsdp.model.input_offload import InputOffload

log = logging.getLogger("qlora_fsdp")


def set_activation_policy(layers: Sequence[nn.Module], policies: Sequence[Policy]) -> None:
    """Have each layer keep, recompute or offload its activations while it trains.

    Non-reentrant checkpointing (torch.utils.checkpoint): inputs need not require gradients, so no hook on the
    embeddings is needed for 'element 0 of tensors does not require grad' not to happen.

    Policies change no bit of a result and no collective, so a rank may change its own between two micro-batches.

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


class MemoryFallback:
    """Takes a step towards smaller activation policies each time it is called; of this rank alone.

    Args:
        layers: as of `set_activation_policy`.
        policies: that they have.
    """

    def __init__(self, layers: Sequence[nn.Module], policies: Sequence[Policy]) -> None:
        self.layers, self.policies = layers, tuple(policies)

    def __call__(self) -> None:
        """To be called between micro-batches, when the allocator had to look for memory again and again."""
        smaller = next_smaller(self.policies)
        if smaller is None:
            return
        self.policies = smaller
        set_activation_policy(self.layers, smaller)
        log.warning(f"Memory: less room than planned: from now on activations {describe_policies(smaller)} (auto)")
