"""Stand-ins for the rest of a training step, so that one layer can be traced alone: its inputs and a loss."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from qlora_fsdp.common.replaced import replaced


class Source(torch.autograd.Function):
    """The same tensor, which needs a gradient now. The gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None


class Sink(torch.autograd.Function):
    """A loss of a tensor, which does not keep the tensor for backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device="meta")


class Pass(torch.autograd.Function):
    """A layer that computes nothing: a new tensor like its input, and a new gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, torch.empty_like(grads[0]) if ctx.needs_input_grad[1] else None, None


@contextmanager
def replaced_forwards(layers: Iterable[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, calling a layer calls `function(layer, forward, *args, **kwargs)`."""
    different = dict.fromkeys(layers)  # layers that are alike may be one module
    with replaced((vars(layer), "forward", partial(function, layer, layer.forward)) for layer in different):
        yield


@contextmanager
def gradients_freed(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """While it lasts, a parameter's gradient is freed once it is complete: the plan counts gradients separately."""

    def free(param: Tensor) -> None:
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(free) for param in params if param.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While it lasts, tensors in reference cycles stay alive. Otherwise it would be chance when they are freed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, tensors of the model that are real, such as rotary frequencies, are on meta."""
    changes: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor) and not value.is_meta:
                    changes.append((table, name, value.to("meta")))
    with replaced(changes):
        yield


def shared_configs(layer: nn.Module) -> dict[int, Any]:
    """A `deepcopy` memo that shares the model's config, which every module refers to."""
    found = (value for module in layer.modules() for value in vars(module).values())
    return {id(value): value for value in found if isinstance(value, PretrainedConfig)}
