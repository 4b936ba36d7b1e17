"""An `nn.Linear` whose weight exists only as codes and scales, and is dequantized to be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.quantized.formats import Format


class QuantizedLinear(nn.Linear):
    """A frozen linear layer stored as `codes`, `scales` and, with double quantization, `nested_scales`.

    These are plain Parameters with rows (or chunks) along dim 0, so that `fully_shard` shards and gathers them; the
    state bitsandbytes keeps on its own Parameter class would be lost there (FSDP2 returns plain Parameters), and its
    scales would stay whole on every rank. `weight` is a property that dequantizes: nothing takes codes for weights.

    Args:
        in_features: input size; a multiple of the block size for 4-bit formats.
        out_features: output size.
        bias: whether there is a bias, kept as it is in `dtype`.
        format: how the weight is quantized.
        dtype: compute dtype: of the dequantized weight, the input and the output.
        device: where the Parameters are made; usually meta.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        format: Format,
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate the weight
        assert format.refuses(in_features) is None
        self.in_features, self.out_features = in_features, out_features
        self.format, self.compute_dtype = format, dtype
        for name, (shape, part_dtype) in format.parts(out_features, in_features).items():
            tensor = torch.empty(shape, dtype=part_dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None,
        )

    @property
    def part_names(self) -> list[str]:
        """Names of the Parameters that stand for the weight."""
        return list(self.format.parts(self.out_features, self.in_features))

    def parts(self) -> list[Tensor]:
        """The Parameters that stand for the weight, in the order of `part_names`."""
        return [getattr(self, name) for name in self.part_names]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [out_features, in_features] in the compute dtype, made anew at each access."""
        return dequantize_parts(self, self.parts())

    def forward(self, input: Tensor) -> Tensor:
        """x_BI -> y_BO, in the dtype of the input, which must be the compute dtype."""
        return _DequantizedLinear.apply(input, self.bias, self, *self.parts())  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format.quant_type}, double_quant={self.format.double_quant}"


class _DequantizedLinear(torch.autograd.Function):
    """y = x W^T + b with W dequantized for forward, and again for backward.

    Between the two it holds the codes alone: FSDP2 frees and refills their storage, and the input is not needed because
    the weight takes no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear, *parts: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*parts)
        return F.linear(x, dequantize_parts(layer, parts), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts = ctx.saved_tensors  # once: activation checkpointing recomputes them for one access alone
        weight = dequantize_parts(ctx.layer, parts)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_bias, None, *(None for _ in parts)


def dequantize_parts(layer: QuantizedLinear, parts: Sequence[Tensor]) -> Tensor:
    """The weight [out_features, in_features] in the compute dtype, from (gathered) parts in `part_names`' order."""
    named = dict(zip(layer.part_names, parts, strict=True))
    return layer.format.dequantize(named, layer.out_features, layer.in_features, layer.compute_dtype)
