"""The check that every trainable parameter gets a gradient that can be used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from qlora_fsdp.runtime.rows import local_tensor


def check_gradients(
    model: nn.Module,
    is_first_update: bool,
    sum_over_ranks: Callable[[list[float]], list[float]],
    may_be_zero: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Trainable parameters whose gradient is missing, not finite, or zero everywhere.

    LoRA's A gets a gradient of zeros as long as B is zero, which it is until the first update of the weights. So A's
    gradient is not checked for zeros then.

    Args:
        model: after backward.
        is_first_update: the weights have not been updated yet.
        sum_over_ranks: sums a list of floats over ranks.
        may_be_zero: tells of a parameter's name whether its gradient may be all zeros.

    Returns:
        One line for each parameter with a problem, which names it and says what is wrong.
    """
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    flags: list[float] = []
    for _, param in params:
        grad = param.grad
        if grad is None:
            flags += [1.0, 0.0, 0.0]
            continue
        local = local_tensor(grad)
        total = local.double().abs().sum() if local.numel() else torch.zeros((), dtype=torch.float64)
        finite = bool(torch.isfinite(total))
        flags += [0.0, 0.0 if finite else 1.0, float(finite and total > 0)]
    flags = sum_over_ranks(flags)
    problems = []
    for index, (name, _) in enumerate(params):
        missing, infinite, nonzero = flags[3 * index : 3 * index + 3]
        if missing:
            problems.append(f"{name} got no gradient: nothing in the loss depends on it, or its path is detached")
        elif infinite:
            problems.append(f"{name} got a NaN or infinite gradient")
        elif not nonzero and not (is_first_update and ".lora_A." in name) and not may_be_zero(name):
            problems.append(f"{name} got a gradient of zeros: its output does not reach the loss")
    return problems
