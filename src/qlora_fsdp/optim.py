"""The optimizer and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qlora_fsdp.config.schema import LrScheduler, OptimConfig, Optimizer
from qlora_fsdp.shards import local_tensor


def make_optimizer(params: Iterable[nn.Parameter], config: OptimConfig, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW over the trainable shards: torch's fused, or bitsandbytes' with 8-bit block-wise state (arXiv:2110.02861).

    Args:
        params: trainable, sharded.
        config: which of the two, and its settings.
        learning_rate: of the first step; the loop sets the others.
    """
    is_8bit = config.name is Optimizer.adamw_8bit
    adamw: Callable[..., torch.optim.Optimizer] = LocalAdamW8bit if is_8bit else partial(LocalAdamW, fused=True)
    betas = (config.betas[0], config.betas[1])
    return adamw(list(params), lr=learning_rate, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


class LocalAdamW(torch.optim.AdamW):
    """torch's fused AdamW on each rank's own rows. State is made, named and saved as AdamW's own.

    Through DTensor the host takes some milliseconds a step for some hundred adapters, while the GPU waits.
    """

    _tensors: tuple[list[Tensor], ...] = ()
    _held: Sequence[Tensor] = ()  # the parameters and states that these are the local parts of

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        if not params or any(not self.state[p] for p in params):
            super().step()  # the first one makes the state
            return
        keys = ("exp_avg", "exp_avg_sq", "step")
        if self._is_stale(params):
            states = [[local_tensor(self.state[p][key]) for p in params] for key in keys]
            self._tensors = ([local_tensor(p) for p in params], *states)
            self._held = [value for p in params for value in (p, self.state[p]["exp_avg"])]
        local_params, averages, squares, steps = self._tensors
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            local_params,
            [local_tensor(cast(Tensor, p.grad)) for p in params],
            averages,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _is_stale(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether other parameters have gradients now, or a checkpoint has been loaded, which makes the state anew."""
        held = [value for param in params for value in (param, self.state[param]["exp_avg"])]
        return len(held) != len(self._held) or any(old is not new for old, new in zip(self._held, held, strict=True))


class LocalAdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' AdamW8bit on each rank's own rows: its kernels have no DTensor rule, and AdamW is element-wise."""

    def __init__(self, params: Sequence[nn.Parameter], **options: Any) -> None:
        from bitsandbytes.optim.adamw import AdamW8bit

        super().__init__(params, options)
        self.pairs = [(p, nn.Parameter(local_tensor(p))) for p in params if local_tensor(p).numel()]
        self.inner = AdamW8bit([local for _, local in self.pairs], **options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for param, local in self.pairs:
            local.grad = None if param.grad is None else local_tensor(param.grad)
        self.inner.step()
        for _, local in self.pairs:
            local.grad = None


def learning_rate_at(step: int, num_steps: int, peak: float, config: OptimConfig) -> float:
    """The learning rate of a step.

    Args:
        step: 0 for the first optimizer step.
        num_steps: of the run.
        peak: reached when warmup ends.
        config: warmup and shape. Warmup rises linearly over the first steps, the last of which is at the peak; cosine
            and linear then fall to 0 just after the last step (transformers' schedules of these names).
    """
    warmup = config.warmup_steps if config.warmup_steps is not None else math.ceil(config.warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_scheduler_type is LrScheduler.constant:
        return peak
    progress = (step - warmup) / max(1, num_steps - warmup)
    if config.lr_scheduler_type is LrScheduler.linear:
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def clip_gradients(params: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm` (0: leave them).

    Returns:
        The norm before scaling: a scalar, the same on every rank.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
