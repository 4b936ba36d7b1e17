"""Products with quantized weights while text is generated: few rows, no gradients, frozen adapters.

Training multiplies thousands of rows, so that it pays to dequantize a weight first. A step of generation has a row for
each prompt. Writing a whole bfloat16 weight to memory and reading it again then costs five times what reading the
codes costs. bitsandbytes has a kernel that multiplies with the codes themselves, `gemm_4bit`; it takes the scales of
double quantization too. For many rows, such as those of a prompt, the weight is dequantized as always.

Adapters are fp32 Parameters. Their copies in the compute dtype are made once, not in every step, at places that stay
the same: a CUDA graph that was recorded with them reads what `refresh` has written there last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.lora import LoraLinear, LoraPart, active_part, join
from qlora_fsdp.layers.matmul import Addend, DequantizedMatmul
from qlora_fsdp.layers.mlp import GatedMlp
from qlora_fsdp.layers.quantized_format import dynamic_map
from qlora_fsdp.layers.quantized_linear import QuantizedLinear, unflatten

# Up to so many rows the codes are multiplied as they are: bitsandbytes' own bound, below which its kernel is faster
# than a dequantized product on any GPU (`_GEMM_4BIT_CUSTOM_FLOOR_M` in its backends/cuda/ops.py).
FEW_ROWS = 4
# Rows up to which this also holds for weights of so many outputs, which keep all multiprocessors of a large GPU busy.
WIDE_ROWS, WIDE = 32, 8448
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children that are called with the same input
_dequantized = DequantizedMatmul()


class JoinedA:
    """h = x A^T of layers that are called one after another with the same input, such as q, k and v: one product.

    Args:
        parts: the layers with their adapters, in the order in which they are called.
    """

    def __init__(self, parts: Sequence[LoraPart]) -> None:
        self.parts = list(parts)
        self.ranks = [part.lora_a.out_features for part in parts]
        self.a_RI: Tensor | None = None
        self._x: Tensor | None = None
        self._h: tuple[Tensor, ...] = ()

    def refresh(self) -> None:
        """Copy the adapters as they are now."""
        a_RI = join([part.lora_a.weight.detach() for part in self.parts], self.parts[0].layer.compute_dtype)
        if self.a_RI is None:
            self.a_RI = a_RI.clone()
        else:
            self.a_RI.copy_(a_RI)

    def product(self, number: int, x: Tensor, x_NI: Tensor) -> Tensor:
        """h [N, R] of one of the layers. The first one's call computes all; a call with another input, its own."""
        assert self.a_RI is not None
        if number == 0:
            h_NR: Tensor = x_NI @ self.a_RI.t()
            self._x, self._h = x, h_NR.split(self.ranks, 1)
        if self._x is not x:
            a_RI: Tensor = self.a_RI.split(self.ranks)[number]
            return x_NI @ a_RI.t()
        return self._h[number]

    def forget(self) -> None:
        """Let go of the last input."""
        self._x, self._h = None, ()


class DecodeLinear:
    """The forward of a quantized layer, with its adapter or without, while text is generated.

    Args:
        layer: whose codes are multiplied.
        part: the layer with its adapter; None without.
        joined: computes the adapter's first product; None without an adapter.
        number: of the layer among those of `joined`.
    """

    def __init__(
        self, layer: QuantizedLinear, part: LoraPart | None = None, joined: JoinedA | None = None, number: int = 0
    ) -> None:
        self.layer, self.part, self.joined, self.number = layer, part, joined, number
        self.b_OR: Tensor | None = None

    def refresh(self) -> None:
        """Copy the adapter as it is now."""
        if self.part is None or self.joined is None:
            return
        if self.number == 0:
            self.joined.refresh()
        b_OR = (self.part.lora_b.weight.detach() * self.part.scaling).to(self.layer.compute_dtype)
        if self.b_OR is None:
            self.b_OR = b_OR
        else:
            self.b_OR.copy_(b_OR)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        x_NI, addend = x.reshape(-1, x.shape[-1]), None
        if self.joined is not None and self.b_OR is not None:
            addend = Addend(self.joined.product(self.number, x, x_NI), self.b_OR.t())
        if multiplies_codes(self.layer, x_NI):
            y_NO = product_with_codes(self.layer, x_NI)
            return unflatten(y_NO if addend is None else addend.add_to(y_NO), x)
        (y_NO,) = _dequantized.outputs(x_NI, [self.layer], None if addend is None else [addend])
        return unflatten(y_NO, x)


def multiplies_codes(layer: QuantizedLinear, x_NI: Tensor) -> bool:
    """Whether the codes are multiplied as they are: on a GPU, for few rows and 4-bit codes."""
    num_rows = x_NI.shape[0]
    is_few = num_rows <= FEW_ROWS or (num_rows <= WIDE_ROWS and layer.out_features >= WIDE)
    return x_NI.is_cuda and is_few and has_whole_blocks(layer)


def has_whole_blocks(layer: QuantizedLinear) -> bool:
    """Whether codes and scales lie one after another in memory, without filled-up ends of rows."""
    num_scale_bytes = layer.scales.shape[-1] * layer.scales.itemsize
    is_filled_up = layer.format.double_quant and num_scale_bytes != layer.in_features // layer.blocksize
    return layer.format.is_4bit and not is_filled_up


def product_with_codes(layer: QuantizedLinear, x_NI: Tensor) -> Tensor:
    """x W^T + b [N, O] by bitsandbytes' `gemm_4bit`, of a layer that `has_whole_blocks`."""
    scales, nested = layer.scales, {}
    if layer.format.double_quant:
        groups = layer.nested_scales
        nested = {
            "absmax_8bit": scales.view(torch.uint8).view(-1),
            "absmax_code": dynamic_map(x_NI.device),
            "absmax_offset": groups[-1],
        }
        assert NESTED_BLOCKSIZE == 256  # which the kernel takes for granted
        scales = groups[:-1]  # type: ignore[assignment]
    y_NO: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x_NI,
        layer.codes.view(torch.uint8).view(-1, 1),
        (layer.out_features, layer.in_features),
        scales.view(-1),
        layer.blocksize,
        layer.format.quant_type,
        bias=layer.bias,
        **nested,
    )
    return y_NO


class DecodeLayers:
    """All quantized layers of a model, as they compute while text is generated.

    A training model may compute several layers together (rewire.py), in ways that save memory for backward. Here each
    computes for itself, and nothing is kept.

    Args:
        model: not sharded, with its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forwards: dict[nn.Module, DecodeLinear] = {}
        self.mlps: dict[nn.Module, GatedMlp] = {}
        for module in model.modules():
            self._find_adapted(module)
            if isinstance(forward := vars(module).get("forward"), GatedMlp):
                self.mlps[module] = forward
        adapted = {forward.layer for forward in self.forwards.values()}
        for module in model.modules():
            if isinstance(module, QuantizedLinear) and module not in adapted:
                self.forwards[module] = DecodeLinear(module)

    def _find_adapted(self, parent: nn.Module) -> None:
        """The children of a module that have adapters, those with the same input together."""
        children = {name: child for name, child in parent.named_children() if isinstance(child, LoraLinear)}
        parts = {name: (child, part) for name, child in children.items() if (part := active_part(child)) is not None}
        groups: list[tuple[str, ...]] = [names for names in TOGETHER if all(name in parts for name in names)]
        groups += [(name,) for name in parts if not any(name in names for names in groups)]
        for names in groups:
            joined = JoinedA([parts[name][1] for name in names])
            for number, name in enumerate(names):
                child, part = parts[name]
                self.forwards[child] = DecodeLinear(part.layer, part, joined, number)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it lasts, the layers compute so, with the adapters as they were when it began."""
        for module, forward in self.forwards.items():
            forward.refresh()
            module.forward = forward
        for module, mlp in self.mlps.items():
            module.forward = mlp.plain
        try:
            yield
        finally:
            for module, forward in self.forwards.items():
                del module.forward
                if forward.joined is not None:
                    forward.joined.forget()
            for module, mlp in self.mlps.items():
                module.forward = mlp
