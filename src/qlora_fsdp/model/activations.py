"""Give every transformer layer its activation policy, and a smaller one where memory is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from qlora_fsdp.layers.attention.kept import keep_attention
from qlora_fsdp.layers.rewire import recompute_norms
from qlora_fsdp.memory.ladders import describe_policies, next_smaller
from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model.input_offload import InputOffload

log = logging.getLogger("qlora_fsdp")


def set_activation_policy(
    layers: Sequence[nn.Module], policies: Sequence[Policy], inputs: InputOffload | None = None
) -> None:
    """Have each layer keep, recompute or offload its activations while it trains.

    A policy changes no bit of a result. Nor does it change a collective, unless ranks share sequences: a layer that is
    computed again exchanges heads again. Else a rank may change its own between two micro-batches.

    Layers are recomputed by torch.utils.checkpoint without reentrance. Their inputs then need not require gradients,
    which frozen embeddings do not give them.

    Args:
        layers: transformers' `GradientCheckpointingLayer`s, in order.
        policies: the policy of each layer.
        inputs: where offloaded inputs and results go; None for a place of these layers' own.
    """
    # Keeping the state of random numbers for every layer takes time, and can't be part of a CUDA graph.
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=any(map(has_dropout, layers)))
    inputs = inputs or InputOffload()
    to_host = partial(keep_attention, partial(inputs.pack, is_result=True), inputs.unpack)
    ways: dict[Policy, Callable[..., Any] | None] = {
        Policy.none: None,
        Policy.selective: None,
        Policy.attention: partial(recompute, context_fn=keep_attention),
        Policy.full: recompute,
        Policy.offload: partial(inputs.run, recompute),
        Policy.offload_attention: partial(inputs.run, partial(recompute, context_fn=to_host)),
    }
    for layer, policy in zip(layers, policies, strict=True):
        if policy is not Policy.none:
            recompute_norms(layer)
        _recompute_by(layer, ways[policy])


def has_dropout(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: a dropout layer, or a rate that its code passes on."""
    return any(
        (isinstance(each, nn.Dropout) and each.p > 0)
        or any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(each).items())
        for each in module.modules()
    )


def _recompute_by(layer: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let transformers' layer call itself through `function`; None to call it directly."""
    layer.gradient_checkpointing = function is not None  # type: ignore[assignment]
    if function is not None:
        layer._gradient_checkpointing_func = function  # type: ignore[assignment]


class MemoryFallback:
    """Gives the layers of this rank smaller activation policies, one step each time it is called."""

    def __init__(
        self, layers: Sequence[nn.Module], policies: Sequence[Policy], inputs: InputOffload | None = None
    ) -> None:
        self.layers, self.policies, self.inputs = layers, tuple(policies), inputs

    def __call__(self) -> None:
        """Take one step. To be called between micro-batches, when the allocator had to search for memory repeatedly."""
        smaller = next_smaller(self.policies)
        if smaller is None:
            return
        self.policies = smaller
        set_activation_policy(self.layers, smaller, self.inputs)
        log.warning(f"Memory: less room than planned: from now on activations {describe_policies(smaller)} (auto)")
