"""The load-balancing loss of a mixture of experts, as the model's own code defines it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.experts import has_experts


class RouterLoss:
    """`coef` times the loss that is 1 where tokens spread evenly over experts (arXiv:2101.03961, equations 4 to 6).

    It is a mean over the tokens of a micro-batch, and counts for as much of a step as the micro-batch has targets.
    Routers are frozen, so it moves adapters alone: towards hidden states that are routed more evenly.

    Raises:
        ConfigError: the model's code defines no such loss.
    """

    def __init__(self, base: PreTrainedModel, coef: float) -> None:
        function = vars(sys.modules[type(base).__module__]).get("load_balancing_loss_func")
        if function is None or not hasattr(base, "num_experts_per_tok"):
            reason = f"can't be used: transformers' {type(base).__name__} has no load-balancing loss."
            fix = "Set training.router_aux_loss_coef=0."
            raise ConfigError([Problem(f"training.router_aux_loss_coef={coef}", reason, fix)])
        self.function = cast(Callable[..., Tensor], function)
        self.coef = coef
        self.num_experts: int = cast(Any, base).num_experts
        self.top_k: int = cast(Any, base).num_experts_per_tok

    def of(self, router_logits: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """The loss of a micro-batch, a float32 scalar.

        Args:
            router_logits: each layer's, [B * L, E].
            batch: padding in it does not count, unless there is nothing else: a rank may have no rows in a short step,
                and no targets to multiply the loss by, which must not be a mean over nothing then.
        """
        assert batch.num_tokens is not None
        column = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        is_token = column < batch.num_tokens[:, None]
        mask = (is_token | ~is_token.any()).long()
        loss = self.function(router_logits, self.num_experts, self.top_k, mask)
        return self.coef * loss


def describe_router_loss(base: PreTrainedModel, coef: float) -> list[str]:
    """A note for the log on a model whose own loss has a term for its routers; none for other models."""
    own = getattr(base.config.get_text_config(), "router_aux_loss_coef", None)
    if own is None or coef or not has_experts(base):
        return []
    return [f"no load-balancing loss (training.router_aux_loss_coef=0; the model's config has {own})"]
