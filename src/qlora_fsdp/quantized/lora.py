"""LoRA over a (quantized) linear layer, as one autograd function where that is possible.

PEFT's `lora.Linear` stays the module: its parameters, names, saving and loading are PEFT's. Only its forward is ours,
for three reasons: adapter weights are fp32 Parameters (one trainable dtype in an FSDP group, and an optimizer that does
not lose small updates) that are cast here to the compute dtype, without autocast; the weight is dequantized once a
pass; and only the input is kept for backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.quantized.linear import QuantizedLinear, dequantize_parts


class LoraLinear(lora.Linear):
    """PEFT's LoRA layer with a forward for fp32 adapters on a frozen base in another dtype."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_BI -> y_BO: base(x) + scaling * B(A(dropout(x))), in the dtype of x."""
        (name,) = self.active_adapters
        if args or kwargs or self.merged or self.disable_adapters or name in self.lora_variant:
            return super().forward(x, *args, **kwargs)
        lora_a, lora_b = cast(nn.Linear, self.lora_A[name]).weight, cast(nn.Linear, self.lora_B[name]).weight
        dropout, scaling = self.lora_dropout[name], self.scaling[name]
        drops = self.training and isinstance(dropout, nn.Dropout)
        if isinstance(self.base_layer, QuantizedLinear) and not drops:
            layer = self.base_layer
            return _QuantizedLoraLinear.apply(  # type: ignore[no-any-return,no-untyped-call]
                x, layer.bias, lora_a, lora_b, scaling, layer, *layer.parts()
            )
        low_rank = F.linear(F.linear(dropout(x), lora_a.to(x.dtype)), lora_b.to(x.dtype))
        return self.base_layer(x) + low_rank * scaling  # type: ignore[no-any-return]


class _QuantizedLoraLinear(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T; keeps x and x A^T, and dequantizes W again for backward.

    Shapes: x_NI, W_OI, A_RI, B_OR, y_NO, with N all leading dimensions and R the rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
        layer: QuantizedLinear,
        *parts: Tensor,
    ) -> Tensor:
        x_NI = x.reshape(-1, layer.in_features)
        y_NO = F.linear(x_NI, dequantize_parts(layer, parts), bias)
        h_NR = x_NI @ lora_a.to(x.dtype).t()
        y_NO.addmm_(h_NR, lora_b.to(x.dtype).t(), alpha=scaling)
        ctx.layer, ctx.scaling = layer, scaling
        ctx.save_for_backward(x_NI, h_NR, lora_a, lora_b, *parts)
        return y_NO.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | float | None, ...]:
        x_NI, h_NR, lora_a, lora_b, *parts = ctx.saved_tensors
        dtype, scaling = x_NI.dtype, ctx.scaling
        grad_NO = grads[0].reshape(-1, grads[0].shape[-1])
        grad_h_NR = (grad_NO @ lora_b.to(dtype)).mul_(scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x_NI = grad_NO @ dequantize_parts(ctx.layer, parts)
            grad_x_NI.addmm_(grad_h_NR, lora_a.to(dtype))
            grad_x = grad_x_NI.view(*grads[0].shape[:-1], -1)
        grad_bias = grad_NO.sum(0) if ctx.needs_input_grad[1] else None
        grad_a = _mm_fp32(grad_h_NR.t(), x_NI)
        grad_b = _mm_fp32(grad_NO.t(), h_NR).mul_(scaling)
        return grad_x, grad_bias, grad_a, grad_b, None, None, *(None for _ in parts)


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with an fp32 result: the gradient of an fp32 adapter is not rounded to the compute dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
