"""RMSNorms whose output is recomputed in backward, not kept, and which add the residual's gradient to their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Recompute = Callable[[Tensor], Tensor]


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is an RMSNorm, transformers' or Liger's, by the name of its class (`LigerRMSNormForGlm4`)."""
    name = type(module).__name__  # a gated one (`Qwen3NextRMSNormGated`) is called in another way
    return name.endswith("RMSNorm") or name.startswith("LigerRMSNorm")


class LastNorm:
    """Remembers what the norm of a transformer layer that ran last was given, and what it gave.

    The linear layers after a norm need its output again in backward. They can keep its input in the place of its
    output, and recompute the output: the norm keeps its input anyway, so keeping it costs nothing more. But between
    the norm and these layers lies transformers' code, which hands on the output alone. So they ask here whether the
    tensor they got is the norm's output, and of what it was made.

    The references are weak, because this object outlives the step and must not keep activations alive. If the input
    is gone, or another norm ran in between, a layer learns nothing here and keeps the output, which is always right.
    """

    def __init__(self) -> None:
        self._input: Callable[[], Tensor | None] = _nothing
        self._output: Callable[[], Tensor | None] = _nothing
        self._recompute: Recompute | None = None

    def remember(self, x: Tensor, y: Tensor, recompute: Recompute) -> None:
        """The norm gave y for x, and `recompute(x)` computes y again."""
        self._input, self._output, self._recompute = weakref.ref(x), weakref.ref(y), recompute

    def source_of(self, y: Tensor) -> tuple[Tensor | None, Recompute | None]:
        """A tensor to keep instead of y, and a function from it to y; (None, None) if y itself must be kept."""
        if self._output() is not y or (x := self._input()) is None:
            return None, None
        return x.detach(), self._recompute


def _nothing() -> None:
    return None


def normalize_and_remember(normalize: Recompute, last_norm: LastNorm, x: Tensor) -> Tensor:
    """The forward of a norm whose output is recomputed in backward."""
    y = normalize(x)
    last_norm.remember(x, y, normalize)
    return y


def recompute_input(kept: Tensor, recompute: Recompute | None) -> Tensor:
    """x_NI of what was kept for it: x itself if there is no `recompute`."""
    x = kept if recompute is None else recompute(kept)
    return x.reshape(-1, x.shape[-1])


def normalize_as_stored(normalize: Recompute, x: Tensor) -> Tensor:
    """The forward of a norm of attention heads that copies nothing.

    Gemma 3 normalizes heads after it has transposed them: x is [B, H, L, D], but lies in memory as [B, L, H, D]. A
    kernel that wants contiguous rows would copy it. So the norm gets x as it lies, and its result is transposed.
    """
    if x.ndim == 4 and not x.is_contiguous() and (stored := x.transpose(1, 2)).is_contiguous():
        return normalize(stored).transpose(1, 2)
    return normalize(x)


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
