"""The check that every trainable parameter gets a gradient that can be used."""

from __future__ import annotations

import torch

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import local_tensor


def check_gradients(model: TaskModel, step: int, is_first_update: bool, processes: Processes) -> None:
    """Check the gradients after the last backward of a step. This waits for the GPU.

    Args:
        model: sharded.
        step: optimizer steps done before this one.
        is_first_update: the weights have not been updated yet.
        processes: all ranks take part.

    Raises:
        TrainingError: a trainable parameter's gradient is missing, not finite, or zero everywhere.
    """
    problems = _find_problems(model, is_first_update, processes)
    if not problems:
        return
    fix = "Take their layers out of lora.target_modules or lora.modules_to_save, or check the data"
    if not is_first_update and any(".lora_A." not in name for name in problems):  # whose gradients were checked before
        fix = "They had one until the weights were updated. Set training.learning_rate lower, or check the data"
    raise TrainingError(
        f"{len(problems)} parameters that should be trained got no usable gradient in step {step + 1}. {fix}:\n"
        f"{list_some([f'{name} {reason}' for name, reason in problems.items()])}"
    )


def _find_problems(model: TaskModel, is_first_update: bool, processes: Processes) -> dict[str, str]:
    """What is wrong with each parameter that has a problem, by its name.

    LoRA's A gets a gradient of zeros as long as B is zero, which it is until the first update of the weights. So A's
    gradient is not checked for zeros then.
    """
    params = [(name, param) for name, param in model.model.named_parameters() if param.requires_grad]
    flags: list[float] = []  # three for each parameter, of which each rank knows its own rows
    for _, param in params:
        grad = param.grad
        if grad is None:
            flags += [1.0, 0.0, 0.0]
            continue
        local = local_tensor(grad)
        total = local.double().abs().sum() if local.numel() else torch.zeros((), dtype=torch.float64)
        finite = bool(torch.isfinite(total))
        flags += [0.0, 0.0 if finite else 1.0, float(finite and total > 0)]
    flags = processes.sum(flags)
    problems = {}
    for index, (name, _) in enumerate(params):
        missing, infinite, nonzero = flags[3 * index : 3 * index + 3]
        if missing:
            problems[name] = "got no gradient: nothing in the loss depends on it, or its path is detached"
        elif infinite:
            problems[name] = "got a NaN or infinite gradient"
        elif not nonzero and not (is_first_update and ".lora_A." in name) and not model.may_get_zero_gradient(name):
            problems[name] = "got a gradient of zeros: its output does not reach the loss"
    return problems
