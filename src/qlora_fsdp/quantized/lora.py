"""LoRA over a (quantized) linear layer, without autocast and with one dequantization a pass.

PEFT's `lora.Linear` stays the module: its parameters, names, saving and loading are PEFT's. Only its forward is ours:
adapter weights are fp32 Parameters (one trainable dtype in an FSDP group, and an optimizer that does not lose small
updates) that are cast here to the compute dtype, and little more than the input is kept for backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.quantized.linear import QuantizedLinear


class LoraLinear(lora.Linear):
    """PEFT's LoRA layer with a forward for fp32 adapters on a frozen base in another dtype."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BI -> y_BO: base(x) + scaling * B(A(dropout(x))), in the dtype of x."""
        (name,) = self.active_adapters
        if args or kwargs or self.merged or self.disable_adapters or name in self.lora_variant:
            return super().forward(x, *args, **kwargs)
        lora_a = cast(nn.Linear, self.lora_A[name]).weight
        dropout, scaling = self.lora_dropout[name], self.scaling[name]
        drops = self.training and isinstance(dropout, nn.Dropout)
        if isinstance(self.base_layer, QuantizedLinear) and not drops:
            return _quantized_lora(x, self.base_layer, lora_a, cast(nn.Linear, self.lora_B[name]), scaling)
        lora_b = cast(nn.Linear, self.lora_B[name]).weight
        low_rank = F.linear(F.linear(dropout(x), lora_a.to(x.dtype)), lora_b.to(x.dtype))
        return self.base_layer(x) + low_rank * scaling  # type: ignore[no-any-return]


def _quantized_lora(x: Tensor, layer: QuantizedLinear, lora_a: Tensor, lora_b: nn.Linear, scaling: float) -> Tensor:
    """y = x W^T + b + s (x A^T) B^T, in two steps that save what backward needs before the large product is made.

    torch.utils.checkpoint ends a recomputation at the last saved tensor. A transformer layer's last product
    (`down_proj`, a quarter of its work) comes after that, and so is not made again.

    Shapes: x_NI, W_OI, A_RI, B_OR, h_NR, y_NO, with N all leading dimensions and R the rank.
    """
    h_NR, x_again = _LowRank.apply(x, lora_a)  # type: ignore[no-untyped-call]
    x = x_again if x.requires_grad else x
    return _AddLowRank.apply(x, h_NR, lora_b.weight, layer.bias, lora_b, scaling, layer)  # type: ignore[no-any-return,no-untyped-call]


class _LowRank(torch.autograd.Function):
    """h = x A^T, and x once more: its gradient from the large product comes back here and is added to in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_a: Tensor) -> tuple[Tensor, Tensor]:
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI, lora_a)
        return x_NI @ lora_a.to(x.dtype).t(), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h_NR, grad_x = grads
        x_NI, lora_a = ctx.saved_tensors  # once: recomputation hands them out for one access alone
        if ctx.needs_input_grad[0]:
            grad_x.view(x_NI.shape).addmm_(grad_h_NR, lora_a.to(x_NI.dtype))
        return grad_x if ctx.needs_input_grad[0] else None, _mm_fp32(grad_h_NR.t(), x_NI)


class _AddLowRank(torch.autograd.Function):
    """y = x W^T + b + s h B^T. Keeps h alone, which is small; W and B are read from their layers in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h_NR: Tensor,
        lora_b: Tensor,
        bias: Tensor | None,
        lora_b_layer: nn.Linear,
        scaling: float,
        layer: QuantizedLinear,
    ) -> Tensor:
        y = F.linear(x, layer.weight, bias)
        y.view(-1, layer.out_features).addmm_(h_NR, lora_b.to(x.dtype).t(), alpha=scaling)
        # Not save_for_backward: that would be the last saved tensor, and the product before it made again.
        ctx.h_NR, ctx.lora_b_layer, ctx.scaling, ctx.layer = h_NR.detach(), lora_b_layer, scaling, layer
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_NO = grad.reshape(-1, grad.shape[-1])
        grad_h_NR = (grad_NO @ ctx.lora_b_layer.weight.to(grad.dtype)).mul_(ctx.scaling)
        grad_b = _mm_fp32(grad_NO.t(), ctx.h_NR).mul_(ctx.scaling)
        grad_x = grad @ ctx.layer.weight if ctx.needs_input_grad[0] else None
        grad_bias = grad_NO.sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_h_NR, grad_b, grad_bias, None, None, None


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result: the gradient of an fp32 adapter is not rounded to the compute dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
