"""Stand-ins for the rest of a training step, so that one layer can be traced alone: inputs, a loss, fused attention."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from qlora_fsdp.common.replaced import replaced

aten: Any = torch.ops.aten
_PLAIN = F.scaled_dot_product_attention


class GradientSource(torch.autograd.Function):
    """The same tensor, which needs a gradient now. The gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None


class LossSink(torch.autograd.Function):
    """A loss of a tensor, which does not keep the tensor for backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        ctx.dtype = y.dtype
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


@contextmanager
def fused_attention(is_cuda: bool) -> Iterator[None]:
    """While it lasts, attention is one kernel that keeps its inputs, its output and a log-sum per query.

    Without a mask that is flash attention, if queries and values are equally wide and in 16 bits; else it is the
    memory-efficient kernel, which adds a mask as a bias. On a CPU flash attention takes masks too. A matrix of all
    queries and keys never exists.
    """
    # A mode of torch would be off while backward computes a layer again.
    with patch.object(F, "scaled_dot_product_attention", partial(_attention, is_cuda)):
        yield


# It has the parameters of torch's scaled_dot_product_attention, for which it stands.
def _attention(
    is_cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.empty(bias.shape, dtype=query.dtype, device=bias.device)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if not is_cuda and query.shape[-1] != value.shape[-1]:  # no kernel on a CPU: matrix products
        return _PLAIN(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not is_cuda:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and query.shape[-1] == value.shape[-1] and query.itemsize == 2:
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output
