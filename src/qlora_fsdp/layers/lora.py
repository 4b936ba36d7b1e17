"""LoRA over quantized linear layers, without autocast, with one dequantization a pass, and for a group at once.

PEFT's `lora.Linear` stays the module: its parameters, names, saving and loading are PEFT's. Only its forward is ours:
adapter weights are fp32 Parameters (one trainable dtype in an FSDP group, and an optimizer that does not lose small
updates) that are cast here to the compute dtype, and little more than the input is kept for backward. Layers that share
an input (q, k and v) are one group: the input is read, kept, and given its gradient once.

Shapes: x_NI, W_OI, A_RI, B_OR, h_NR, y_NO, with N all leading dimensions, R the rank, O and R summed over a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.matmul import Addend
from qlora_fsdp.layers.quantized_linear import QuantizedLinear, unflatten


class LoraLinear(lora.Linear):
    """PEFT's LoRA layer with a forward for fp32 adapters on a frozen base in another dtype.

    Attributes:
        group: the layers that get the same input, this one among them; None: it is computed alone.
    """

    group: SharedInput | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BI -> y_BO: base(x) + scaling * B(A(dropout(x))), in the dtype of x."""
        (name,) = self.active_adapters
        if args or kwargs or self.merged or self.disable_adapters or name in self.lora_variant:
            return super().forward(x, *args, **kwargs)
        part = quantized_part(self)
        if part is not None:
            return lora_group(x, [part])[0] if self.group is None else self.group.output(self, part, x)
        lora_a, lora_b = cast(nn.Linear, self.lora_A[name]).weight, cast(nn.Linear, self.lora_B[name]).weight
        low_rank = F.linear(F.linear(self.lora_dropout[name](x), lora_a.to(x.dtype)), lora_b.to(x.dtype))
        return self.base_layer(x) + low_rank * self.scaling[name]  # type: ignore[no-any-return]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's; refused on codes, which have no weight to add to: `python -m qlora_fsdp.merge` merges those."""
        if isinstance(self.base_layer, QuantizedLinear):
            raise NotImplementedError("a quantized base can't be merged in place: use python -m qlora_fsdp.merge")
        super().merge(safe_merge, adapter_names)


@dataclass(frozen=True)
class LoraPart:
    """A quantized layer with the adapter that is active on it."""

    layer: QuantizedLinear
    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float


def quantized_part(module: nn.Module) -> LoraPart | None:
    """The layer and its adapter, if the functions here compute them: quantized, no dropout now, no DoRA, not merged."""
    if not isinstance(module, LoraLinear) or not isinstance(module.base_layer, QuantizedLinear):
        return None
    (name,) = module.active_adapters
    drops = module.training and isinstance(module.lora_dropout[name], nn.Dropout)
    if drops or module.merged or module.disable_adapters or name in module.lora_variant:
        return None
    lora_a, lora_b = cast(nn.Linear, module.lora_A[name]), cast(nn.Linear, module.lora_B[name])
    return LoraPart(module.base_layer, lora_a, lora_b, module.scaling[name])


class SharedInput:
    """Layers that are called in turn with the same tensor; the first call computes all.

    Args:
        modules: in the order in which they are called.
    """

    def __init__(self, modules: Sequence[LoraLinear]) -> None:
        self.modules = list(modules)
        self.input: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def output(self, module: LoraLinear, part: LoraPart, x: Tensor) -> Tensor:
        """The module's output; alone, if x is not what the first one was called with."""
        if module is self.modules[0]:
            parts = [found for member in self.modules if (found := quantized_part(member)) is not None]
            if len(parts) == len(self.modules):
                self.input, self.outputs = x, dict(zip(map(id, self.modules), lora_group(x, parts), strict=True))
        if self.input is not x or id(module) not in self.outputs:
            self.input, self.outputs = None, {}  # what nobody will fetch must not keep its graph alive
            return lora_group(x, [part])[0]
        y = self.outputs.pop(id(module))
        if not self.outputs:
            self.input = None
        return y


def lora_group(x: Tensor, parts: Sequence[LoraPart]) -> tuple[Tensor, ...]:
    """y = x W^T + b + s (x A^T) B^T of each part, in two steps that save what backward needs before the large products.

    torch.utils.checkpoint ends a recomputation at the last saved tensor. A transformer layer's last product
    (`down_proj`, a quarter of its work) comes after that, and so is not made again.
    """
    h_NR = _LowRank.apply(x.detach(), *origin_of(x), *(p.lora_a.weight for p in parts))  # type: ignore[no-untyped-call]
    return add_low_rank(x, h_NR, parts)


def add_low_rank(x: Tensor, h_NR: Tensor, parts: Sequence[LoraPart], h_is_of_x: bool = True) -> tuple[Tensor, ...]:
    """y = x W^T + b + s h B^T of each part.

    Args:
        x: [..., I].
        h_NR: x A^T of all parts.
        parts: layers and adapters.
        h_is_of_x: the gradient of x takes that of h in; otherwise whoever made h does that.
    """
    biases = [part.layer.bias for part in parts]
    lora_b = [part.lora_b.weight for part in parts]
    return _AddLowRank.apply(x, h_NR, parts, h_is_of_x, *lora_b, *biases)  # type: ignore[no-any-return,no-untyped-call]


def remake_output(norm: nn.Module) -> None:
    """Let the layers that get this norm's output keep its input instead, which is kept anyway, and make it again."""
    if getattr(norm, "is_remade", False):
        return
    make = norm.forward

    def forward(x: Tensor) -> Tensor:
        y: Tensor = make(x)
        y.origin = (x.detach(), make)  # type: ignore[attr-defined]
        return y

    norm.forward = forward
    norm.is_remade = True  # type: ignore[assignment]  # for who computes it in another way: `norm.py`


def origin_of(x: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
    """What to keep instead of x, and how to make x of it; (None, None): keep x."""
    origin: tuple[Tensor | None, Callable[[Tensor], Tensor] | None] = getattr(x, "origin", (None, None))
    return origin


def remade(kept: Tensor, make: Callable[[Tensor], Tensor] | None) -> Tensor:
    """x_NI of what was kept."""
    x = kept if make is None else make(kept)
    return x.reshape(-1, x.shape[-1])


class _LowRank(torch.autograd.Function):
    """h = x A^T. The gradient of x by way of h is that of `_AddLowRank`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, origin: Tensor | None, make: Callable[[Tensor], Tensor] | None, *lora_a: Tensor
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI if origin is None else origin)
        ctx.make, ctx.ranks = make, [a.shape[0] for a in lora_a]
        return x_NI @ join(lora_a, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return (None, None, None, *mm_fp32(grads[0].t(), remade(kept, ctx.make)).split(ctx.ranks))


class _AddLowRank(torch.autograd.Function):
    """y = x W^T + b + s h B^T. Keeps h alone, which is small; W, A and B are read from their layers in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h_NR: Tensor,
        parts: Sequence[LoraPart],
        h_is_of_x: bool,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layers, ranks = [part.layer for part in parts], _split_ranks(h_NR, parts)
        addends = [Addend(h, _b(p, x.dtype).t()) for h, p in zip(ranks, parts, strict=True)]
        outputs = layers[0].matmul.outputs(x.reshape(-1, x.shape[-1]), layers, addends)
        # Not save_for_backward: that would be the last saved tensor, and the products before it made again.
        ctx.h_NR, ctx.parts, ctx.shape, ctx.h_is_of_x = h_NR.detach(), parts, x.shape, h_is_of_x
        return tuple(unflatten(y, x) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts: Sequence[LoraPart] = ctx.parts
        layers = [part.layer for part in parts]
        grads_NO = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grads_h = [g @ _b(p, g.dtype) for g, p in zip(grads_NO, parts, strict=True)]
        grad_h_NR = grads_h[0] if len(parts) == 1 else torch.cat(grads_h, 1)
        grads_b = [
            mm_fp32(grad.t(), h).mul_(part.scaling)
            for grad, h, part in zip(grads_NO, _split_ranks(ctx.h_NR, parts), parts, strict=True)
        ]
        needs_bias = ctx.needs_input_grad[4 + len(parts) :]
        grads_bias = [g.sum(0) if needed else None for g, needed in zip(grads_NO, needs_bias, strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            a_RI = join([part.lora_a.weight for part in parts], grad_h_NR.dtype)
            addend = Addend(grad_h_NR, a_RI) if ctx.h_is_of_x else None
            grad_x = layers[0].matmul.input_grad(grads_NO, layers, addend).view(ctx.shape)
        return (grad_x, grad_h_NR, None, None, *grads_b, *grads_bias)


def _b(part: LoraPart, dtype: torch.dtype) -> Tensor:
    """The scaled B [O, R] of an adapter."""
    return (part.lora_b.weight * part.scaling).to(dtype)


def join(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Adapter matrices one below another, in the compute dtype."""
    return torch.cat([weight.to(dtype) for weight in weights]) if len(weights) > 1 else weights[0].to(dtype)


def _split_ranks(h_NR: Tensor, parts: Sequence[LoraPart]) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], h_NR.split([part.lora_b.in_features for part in parts], 1))


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result: the gradient of an fp32 adapter is not rounded to the compute dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
