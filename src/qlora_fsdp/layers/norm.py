"""A pre-norm transformer layer in which the backward of each norm adds the gradient of the residual beside it.

By itself autograd adds these two in a pass of its own over memory, twice a layer, and a norm's backward makes a
gradient for its weight, which is frozen here.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.common.families import PRENORM_LAYERS


def join_norms(layer: nn.Module) -> None:
    """Give such a layer the forward of `PreNorm`.

    By a class of its own: transformers recomputes a layer in its class's forward, and would not know an instance's.
    """
    drops = any(child.p > 0 for child in layer.children() if isinstance(child, nn.Dropout))
    if type(layer).__name__ in PRENORM_LAYERS and not drops:
        kind: Any = type(layer)
        layer.__class__ = _joined(kind)


@cache
def _joined(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (PreNorm, kind), {"__module__": kind.__module__})


class PreNorm(nn.Module):
    """What such a layer computes."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """x_BLD -> y_BLD; the other arguments are the attention's."""
        layer: Any = self
        x, residual = norm_and_residual(layer.input_layernorm, hidden_states)
        x, _ = layer.self_attn(hidden_states=x, **kwargs)
        x, residual = norm_and_residual(layer.post_attention_layernorm, residual + x)
        return residual + layer.mlp(x)  # type: ignore[no-any-return]


def norm_and_residual(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x), and x once more, whose gradient is added to the norm's own."""
    if not x.is_cuda or norm.weight.requires_grad:
        return norm(x), x
    y, residual = NormAndResidual.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    if getattr(norm, "is_remade", False):  # see `lora.remake_output`
        y.origin = (x.detach(), partial(_norm, norm))
    return y, residual


def _norm(norm: Any, x: Tensor) -> Tensor:
    from qlora_fsdp.layers.kernels import triton_norm

    return triton_norm.forward(x.reshape(-1, x.shape[-1]), norm.weight, norm.variance_epsilon)[0].view(x.shape)


class NormAndResidual(torch.autograd.Function):
    """RMSNorm with a frozen weight, and its input once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from qlora_fsdp.layers.kernels import triton_norm

        y_ND, scales = triton_norm.forward(x.reshape(-1, x.shape[-1]), weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return y_ND.view(x.shape), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from qlora_fsdp.layers.kernels import triton_norm

        x, weight, scales = ctx.saved_tensors
        grad_y, grad_residual = (grad.reshape(-1, x.shape[-1]).contiguous() for grad in grads)
        grad_x = triton_norm.backward(x.reshape(-1, x.shape[-1]), weight, scales, grad_y, grad_residual)
        return grad_x.view(x.shape), None, None
