"""RMSNorms: as one kernel; with the residual's gradient added to their own; and recomputed in backward, not kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qlora_fsdp.layers.kernels.launch import runs_kernels

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
        self._input = weakref.ref(x)
        self._output = weakref.ref(y)
        self._recompute = recompute

    def source_of(self, y: Tensor) -> tuple[Tensor | None, Recompute | None]:
        """A tensor to keep instead of y, and a function from it to y; (None, None) if y itself must be kept."""
        x = self._input()
        if x is None or self._output() is not y:
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
    if x.ndim == 4 and not x.is_contiguous():
        stored = x.transpose(1, 2)
        if stored.is_contiguous():
            return normalize(stored).transpose(1, 2)
    return normalize(x)


class NormKind(NamedTuple):
    """What an RMSNorm computes: x / sqrt(mean(x^2) + eps) * (weight + offset).

    Attributes:
        eps: is added to the mean square.
        offset: is added to the weight: 1 in Gemma's, 0 in others.
        rounds_first: whether it rounds to the dtype of x before it multiplies, as Llama's does. Then `offset` is 0.
    """

    eps: float
    offset: float
    rounds_first: bool


def normalize(kind: NormKind, norm: nn.Module, plain: Recompute, x: Tensor) -> Tensor:
    """The forward of a frozen norm of this kind: on a GPU one kernel, and one for the gradient of x; else `plain`."""
    return _compute(kind, norm, x) if runs_kernels(x) else plain(x)


def norm_and_residual(kind: NormKind, norm: nn.Module, x: Tensor, last_norm: LastNorm | None) -> tuple[Tensor, Tensor]:
    """norm(x), and x once more. On a GPU, if the norm is frozen, one function that adds both gradients of x."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    if not runs_kernels(x) or weight.requires_grad:
        return norm(x), x
    y, residual = NormAndResidual.apply(x, weight, kind)  # type: ignore[no-untyped-call]
    if last_norm is not None:  # the norm's own forward did not run, so it has remembered nothing
        last_norm.remember(residual, y, partial(_compute, kind, norm))
    return y, residual


def _compute(kind: NormKind, norm: nn.Module, x: Tensor) -> Tensor:
    return FrozenNorm.apply(x, norm.weight, kind)  # type: ignore[no-any-return,no-untyped-call]


class FrozenNorm(torch.autograd.Function):
    """RMSNorm with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
        return _forward(ctx, x, weight, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grads[0], None), None, None


class NormAndResidual(torch.autograd.Function):
    """RMSNorm with a frozen weight, and its input once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> tuple[Tensor, Tensor]:
        return _forward(ctx, x, weight, kind), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads), None, None


def _forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    from qlora_fsdp.layers.kernels import triton_norm

    x = x.contiguous()
    y_ND, scales = triton_norm.forward(x.view(-1, x.shape[-1]), weight, *kind)
    ctx.save_for_backward(x, weight, scales)
    ctx.offset = kind.offset
    return y_ND.view(x.shape)


def _backward(ctx: Any, grad_y: Tensor, grad_residual: Tensor | None) -> Tensor:
    from qlora_fsdp.layers.kernels import triton_norm

    x, weight, scales = ctx.saved_tensors
    x_ND = x.view(-1, x.shape[-1])
    grad_y = grad_y.reshape(-1, x.shape[-1]).contiguous()
    if grad_residual is not None:
        grad_residual = grad_residual.reshape(-1, x.shape[-1]).contiguous()
    grad_x: Tensor = triton_norm.backward(x_ND, weight, scales, grad_y, grad_residual, ctx.offset)
    return grad_x.view(x.shape)
