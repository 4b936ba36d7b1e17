"""Layers that fail in the middle of a pass, at places where FSDP is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from qlora_fsdp.model.tasks.task_model import TaskModel

# Which of two layers fails: the first before its forward, while the second is being gathered; the second before its
# backward, while the first is; the second behind its backward, when its gradients are not summed over ranks yet.
Place = Literal["forward", "before backward", "behind backward"]
PLACES: tuple[Place, ...] = ("forward", "before backward", "behind backward")


@contextmanager
def failing(model: TaskModel, place: Place, fail: Callable[..., None]) -> Iterator[None]:
    """A context in which a forward, or its backward afterwards, calls `fail` at a layer, behind FSDP's own hooks."""
    layer = model.layers[0 if place == "forward" else 1]

    def before_forward(module: Any, args: tuple[Tensor]) -> None:
        if place == "forward":
            fail()
        elif place == "behind backward":
            args[0].register_hook(fail)

    def behind_forward(module: Any, args: Any, output: Any) -> None:
        if place == "before backward":
            (output if isinstance(output, Tensor) else output[0]).register_hook(fail)

    handles = [layer.register_forward_pre_hook(before_forward), layer.register_forward_hook(behind_forward)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
