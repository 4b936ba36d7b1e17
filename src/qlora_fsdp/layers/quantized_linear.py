"""An `nn.Linear` whose weight exists only as codes and scales, and is dequantized to be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qlora_fsdp.common.errors import ConfigError, Problem
from qlora_fsdp.layers.matmul import FP8_MAX, FP8_MAX_BLOCKSIZE, FP8_MULTIPLE, DequantizedMatmul, Fp8Matmul, Matmul
from qlora_fsdp.layers.quantized_format import Format


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

    Attributes:
        matmul: how products with the weight are made; layers that are computed together share one.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    nested_scales: nn.Parameter
    matmul: Matmul = DequantizedMatmul()
    _fp8_scales: tuple[Tensor, Tensor] | None = None

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
        parts = dict(zip(self.part_names, self.parts(), strict=True))
        return self.format.dequantize(parts, self.out_features, self.in_features, self.compute_dtype)

    def absmax(self) -> Tensor:
        """The scales of a 4-bit weight: float32 [out_features, blocks]."""
        parts = dict(zip(self.part_names, self.parts(), strict=True))
        return self.format.dequantize_scales(parts, self.out_features, self.in_features)

    def fp8_scales(self) -> tuple[Tensor, Tensor]:
        """What fp8 values of the weight are multiples of: float32 [out_features], and [blocks] for the transposed.

        No magnitude in a 4-bit block is above its absmax. The base is frozen, so this is found once and kept.
        """
        if self._fp8_scales is None:
            absmax = self.absmax().abs() / FP8_MAX  # a quantized scale may come out just below 0
            self._fp8_scales = (absmax.amax(1).clamp_min_(1e-12), absmax.amax(0).clamp_min_(1e-12))
        return self._fp8_scales

    def forward(self, input: Tensor) -> Tensor:
        """x_BI -> y_BO, in the dtype of the input, which must be the compute dtype."""
        return _DequantizedLinear.apply(input, self.bias, self)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format.quant_type}, double_quant={self.format.double_quant}"


class _DequantizedLinear(torch.autograd.Function):
    """y = x W^T + b with W made from its codes for forward, and again for backward.

    Nothing is saved in between, not even the codes: backward reads them from the layer, which FSDP has gathered again
    by then. So a recomputation that ends with this layer (torch.utils.checkpoint stops at the last saved tensor) leaves
    its product out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        (y_NO,) = layer.matmul.outputs(x.reshape(-1, x.shape[-1]), [layer])
        return unflatten(y_NO, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = ctx.layer.matmul.input_grad([grad.reshape(-1, grad.shape[-1])], [ctx.layer])
        return grad_x.view(*grad.shape[:-1], ctx.layer.in_features), grad_bias, None


def use_fp8(model: nn.Module) -> int:
    """Have every 4-bit layer whose sizes allow it multiply in fp8; how many do.

    Raises:
        ConfigError: none can.
    """
    matmul, num_layers = Fp8Matmul(), 0
    for layer in model.modules():
        if not isinstance(layer, QuantizedLinear) or not layer.format.is_4bit:
            continue
        if layer.out_features % FP8_MULTIPLE == 0 and layer.format.blocksize <= FP8_MAX_BLOCKSIZE:
            layer.matmul = matmul
            num_layers += 1
    if not num_layers:
        fix = "Set compute=dequantized."
        raise ConfigError([Problem("compute.matmul=fp8", "finds no 4-bit layer in this model.", fix)])
    return num_layers


def unflatten(y_NO: Tensor, x: Tensor) -> Tensor:
    """y with the leading dimensions of x, and not as a view.

    An autograd function's result that is a view must not be changed in place, as Longformer does with its queries.
    """
    y: Tensor = torch.ops.aten._unsafe_view.default(y_NO, [*x.shape[:-1], y_NO.shape[1]])
    return y
