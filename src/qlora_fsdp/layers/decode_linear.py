"""Products with quantized weights while text is generated: few rows, no gradients, frozen adapters.

Training multiplies thousands of rows, so that it pays to dequantize a weight first. A step of generation has a row for
each prompt. Writing a whole bfloat16 weight to memory and reading it again then costs five times what reading the
codes costs. So up to some hundred rows are multiplied with the codes themselves: layers that share an input together,
with their biases and adapters, by one kernel of our own (kernels/triton_products.py). One row of a small weight is
multiplied faster by bitsandbytes' kernel, `gemm_4bit`, which also is what there is in float32. For more rows, such as
those of a prompt, the weight is dequantized as always.

Of a sharded model each rank multiplies with the rows of codes that it has, which gives some of a layer's outputs, and
the ranks put these together (sharding/by_rows.py).

Adapters are fp32 Parameters. Their copies in the compute dtype are made once, not in every step, at places that stay
the same: a CUDA graph that was recorded with them reads what `refresh` has written there last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.common.replaced import replaced
from qlora_fsdp.common.sizes import NESTED_BLOCKSIZE
from qlora_fsdp.layers.experts.decode import DecodeExperts, why_not_coded
from qlora_fsdp.layers.experts.forward import ExpertLora, expert_weight_names
from qlora_fsdp.layers.kernels.launch import has_tensor_cores
from qlora_fsdp.layers.lora import GATE_UP, QKV, LoraLinear, LoraPart, OutputsOfInput, active_part
from qlora_fsdp.layers.mlp import GatedMlp
from qlora_fsdp.layers.quantized.format import dynamic_map
from qlora_fsdp.layers.quantized.linear import QuantizedLinear, own_rows, unflatten
from qlora_fsdp.layers.quantized.matmul import Addend
from qlora_fsdp.layers.quantized.stored_weight import code_books, code_values, weight_codes
from qlora_fsdp.runtime.rows import gather_columns, gather_whole, local_tensor, shard_group

if TYPE_CHECKING:
    from qlora_fsdp.layers.kernels.triton_products import Tile

# Up to this many rows bitsandbytes' kernel may multiply the codes: its own bound, below which its kernel is faster
# than a dequantized product on any GPU (`_GEMM_4BIT_CUSTOM_FLOOR_M` in its backends/cuda/ops.py).
FEW_ROWS = 4
# Rows up to which this also holds for weights of this many outputs, which keep all multiprocessors of a large GPU busy.
WIDE_ROWS = 32
WIDE = 8448
# Up to this many rows two kernels compute the adapters of all layers that share an input (kernels/triton_low_rank.py).
# With more, cuBLAS' products are faster than a program for each row of A.
MAX_ROWS = 8
REFRESHED = 64  # adapters that are copied at a time; scaled float32 copies of their B exist meanwhile
# With fewer multiplications than these, for up to FEW_ROWS rows, bitsandbytes' kernel is faster than ours: 10.8
# microseconds of an H100 for one row and a weight of 4096 x 4096, where ours takes 12.6 with the order of x, and 12.7
# for two rows, where bitsandbytes' takes 15.3 (benchmarks/products.py).
SMALL_PRODUCT = 24e6


class DecodeGroup:
    """Quantized layers that are called one after another with the same input, such as q, k and v; or one layer.

    The first one's call computes the outputs of all.

    Args:
        layers: whose codes are multiplied, in the order in which they are called.
        parts: the same with their adapters; none if they have none.
    """

    def __init__(self, layers: Sequence[QuantizedLinear], parts: Sequence[LoraPart] = ()) -> None:
        self.group = shard_group(layers[0].codes)
        self.widths = [layer.out_features for layer in layers]
        self.layers = [own_rows(layer) for layer in layers]
        self.parts = list(parts)
        self.ranks = [part.lora_a.out_features for part in parts]
        self.a_RI: Tensor | None = None  # A of all layers, one below another, in the compute dtype
        self.a: list[Tensor] = []  # its parts
        self.b: list[Tensor] = []  # B of each layer, [O, R], scaled
        # Of the kernel that multiplies codes, for each tile of the outputs. Branches of a graph must not share them.
        self.counts: Tensor | None = None
        self.outputs = OutputsOfInput()

    def allocate(self) -> None:
        """Take the memory of the adapters' copies and of counts, unless there is some."""
        if self.counts is None:
            from qlora_fsdp.layers.kernels import triton_products

            num = triton_products.max_tiles([layer.out_features for layer in self.layers])
            self.counts = torch.zeros(num, dtype=torch.int32, device=self.layers[0].codes.device)
        if self.parts and not self.a:
            dtype = self.layers[0].compute_dtype
            example = self.parts[0].lora_a.weight
            self.a_RI = torch.empty(sum(self.ranks), example.shape[1], dtype=dtype, device=example.device)
            self.a = list(self.a_RI.split(self.ranks))
            self.b = [torch.empty_like(local_tensor(part.lora_b.weight), dtype=dtype) for part in self.parts]

    def output(self, number: int, x: Tensor) -> Tensor:
        """The output [..., O] of one of the layers. If its input is not that of the first, it is computed alone."""
        x_NI = x.reshape(-1, x.shape[-1])
        if number == 0:
            self.outputs.put(x, self._whole_outputs(x_NI, slice(None)))
        y_NO = self.outputs.fetch(number, x)
        if y_NO is None:
            (y_NO,) = self._whole_outputs(x_NI, slice(number, number + 1))
        return unflatten(y_NO, x)

    def _whole_outputs(self, x_NI: Tensor, some: slice) -> list[Tensor]:
        """The outputs [N, O] of all layers, or of one of them."""
        return gather_columns(self._compute(x_NI, some), self.widths[some], self.group)

    def _compute(self, x_NI: Tensor, some: slice) -> list[Tensor]:
        """The same, but only those outputs whose rows of the weight this rank has."""
        layers = self.layers[some]
        tile = products_tile(layers, x_NI)
        if not self.parts:
            if tile is not None:
                return self._products(x_NI, layers, tile)
            return [_output(layer, x_NI) for layer in layers]
        b = self.b[some]
        ranks = self.ranks[some]
        a_RI = self.a_RI if len(layers) == len(self.layers) else self.a[some.start]
        assert a_RI is not None
        if tile is not None:
            return self._products(x_NI, layers, tile, a_RI, b)
        if len(x_NI) <= MAX_ROWS and all(multiplies_codes(layer, x_NI) for layer in layers):
            return _outputs_of_few_rows(x_NI, layers, a_RI, b)
        h_NR: Tensor = x_NI @ a_RI.t()
        addends = [Addend(h, factor.t()) for h, factor in zip(h_NR.split(ranks, 1), b, strict=True)]
        return [_output(layer, x_NI, addend) for layer, addend in zip(layers, addends, strict=True)]

    def _products(
        self,
        x_NI: Tensor,
        layers: Sequence[QuantizedLinear],
        tile: Tile,
        a_RI: Tensor | None = None,
        b: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """The outputs of layers for which `products_tile` has found a tile: one kernel for all, with their adapters."""
        from qlora_fsdp.layers.kernels import triton_products

        assert self.counts is not None
        x_NI = x_NI.contiguous()
        format = layers[0].format
        h_NR: Tensor | None = None
        if format.is_4bit and a_RI is not None:
            h_NR, x_NI = in_branches([partial(_low_rank, x_NI, a_RI), partial(triton_products.split_even_odd, x_NI)])
        elif format.is_4bit:
            x_NI = triton_products.split_even_odd(x_NI)
        elif a_RI is not None:
            h_NR = _low_rank(x_NI, a_RI)
        return triton_products.products(
            x_NI,
            [weight_codes(layer, layer.bias) for layer in layers],
            code_values(format),
            code_books(format, x_NI.dtype, x_NI.device),
            format.blocksize,
            tile,
            self.counts,
            h_NR,
            b,
            interprets=not x_NI.is_cuda,
        )


class DecodeLinear:
    """The forward of a layer, quantized and perhaps adapted, while text is generated.

    Args:
        group: computes it.
        number: the layer's index in the group.
    """

    def __init__(self, group: DecodeGroup, number: int = 0) -> None:
        self.group = group
        self.number = number

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.group.output(self.number, x)


def _output(layer: QuantizedLinear, x_NI: Tensor, addend: Addend | None = None) -> Tensor:
    """The output of a layer, with what its adapter adds."""
    if layer.out_features == 0:  # of a layer with few rows, this rank has none
        return x_NI.new_empty(len(x_NI), 0)
    if multiplies_codes(layer, x_NI):
        y_NO = product_with_codes(layer, x_NI)
        return y_NO if addend is None else addend.add_to(y_NO)
    weight = _dequantized_weight(layer)
    if addend is None:
        return F.linear(x_NI, weight, layer.bias)
    return addend.alone(layer.bias).addmm_(x_NI, weight.t())


def _dequantized_weight(layer: QuantizedLinear) -> Tensor:
    """W_OI in the compute dtype. On a GPU one kernel makes it, with quantized scales too, as no step can hide three."""
    if layer.reader is not None or not has_tensor_cores(layer.codes.device):
        return layer.weight
    format = replace(layer.format, dequantizer="triton")
    return format.dequantize(layer.named_parts(), layer.out_features, layer.in_features, layer.compute_dtype)


def _outputs_of_few_rows(
    x_NI: Tensor, layers: Sequence[QuantizedLinear], a_RI: Tensor, b: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs of layers for which bitsandbytes multiplies codes, and two kernels for all of their adapters."""
    from qlora_fsdp.layers.kernels import triton_low_rank

    products = [partial(product_with_codes, layer, x_NI) for layer in layers]
    *outputs, h_NR = in_branches([*products, partial(triton_low_rank.first, x_NI, a_RI)])
    triton_low_rank.add_second(h_NR, b, outputs)
    return outputs


def _low_rank(x_NI: Tensor, a_RI: Tensor) -> Tensor:
    """h = x A^T of all adapters, in the dtype of x."""
    if len(x_NI) > MAX_ROWS:
        return x_NI @ a_RI.t()
    from qlora_fsdp.layers.kernels import triton_low_rank

    return triton_low_rank.first(x_NI, a_RI, x_NI.dtype)


def products_tile(layers: Sequence[QuantizedLinear], x_NI: Tensor) -> Tile | None:
    """How our kernel divides the products of layers with the same input.

    Returns:
        None if something else computes them: on a CPU, on GPUs without Triton or bfloat16, in float32, for formats
        without such products, for more rows than it is fast for, for few rows of small weights, and for layers of
        unlike formats, as ranks may have (`own_parts`).
    """
    first = layers[0]
    num_rows = len(x_NI)
    if not x_NI.is_cuda or x_NI.dtype == torch.float32 or num_rows == 0 or not has_tensor_cores(x_NI.device):
        return None
    if not first.format.has_products:
        return None
    for layer in layers:
        is_alike = layer.format == first.format and (layer.bias is None) == (first.bias is None)
        if not is_alike or layer.out_features == 0:
            return None
    from qlora_fsdp.layers.kernels import triton_products

    if num_rows > triton_products.MAX_ROWS:
        return None
    num_outputs = sum(layer.out_features for layer in layers)
    if num_rows > triton_products.MAX_NESTED_ROWS and first.format.is_4bit:
        is_hopper = torch.cuda.get_device_capability(x_NI.device) >= (9, 0)
        tile = triton_products.many_rows_tile(num_outputs, first.in_features, first.blocksize) if is_hopper else None
        if tile is not None or first.format.double_quant:
            return tile
    is_small = num_rows * num_outputs * first.in_features < SMALL_PRODUCT
    if is_small and num_rows <= FEW_ROWS and all(has_whole_blocks(layer) for layer in layers):
        return None
    num_multiprocessors = torch.cuda.get_device_properties(x_NI.device).multi_processor_count
    return triton_products.best_tile(
        num_outputs, first.in_features, num_rows, first.blocksize, first.format.is_4bit, num_multiprocessors
    )


def in_branches(computations: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """The results of computations that do not need one another.

    One row keeps a small part of a GPU busy. So where a CUDA graph is recorded, the computations become branches of it,
    which run at the same time. Kernels that are launched one by one wait for the host, and gain nothing from that.
    """
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return [compute() for compute in computations]
    main = torch.cuda.current_stream()
    streams = _branch_streams(main.device, len(computations) - 1)
    for stream in streams:
        stream.wait_stream(main)
    results = []
    for stream, compute in zip((main, *streams), computations, strict=True):
        with torch.cuda.stream(stream):
            results.append(compute())
    for stream in streams:
        # A result goes back to the stream's own free memory, which the next branches take after they have waited.
        main.wait_stream(stream)
    return results


@cache
def _branch_streams(device: torch.device, number: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(number)]


def multiplies_codes(layer: QuantizedLinear, x_NI: Tensor) -> bool:
    """Whether bitsandbytes' kernel multiplies the codes: on a GPU, for few rows and 4-bit codes."""
    num_rows = x_NI.shape[0]
    is_few = num_rows <= FEW_ROWS or (num_rows <= WIDE_ROWS and layer.out_features >= WIDE)
    return x_NI.is_cuda and is_few and layer.out_features > 0 and has_whole_blocks(layer)


def has_whole_blocks(layer: QuantizedLinear) -> bool:
    """Whether they are bitsandbytes' 4-bit codes, one after another in memory, without filled-up ends of rows."""
    num_scale_bytes = layer.scales.shape[-1] * layer.scales.itemsize
    is_filled_up = layer.format.double_quant and num_scale_bytes != layer.in_features // layer.blocksize
    return layer.format.is_4bit and layer.format.is_bitsandbytes and not is_filled_up


def product_with_codes(layer: QuantizedLinear, x_NI: Tensor) -> Tensor:
    """x W^T + b [N, O] by bitsandbytes' `gemm_4bit`, of a layer that `has_whole_blocks`."""
    scales = layer.scales
    nested = {}
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


def _adapted_children(parent: nn.Module) -> dict[str, LoraPart]:
    """The adapters of a module's children, by the children's names."""
    parts: dict[str, LoraPart] = {}
    for name, child in parent.named_children():
        part = active_part(child) if isinstance(child, LoraLinear) else None
        if part is not None:
            parts[name] = part
    return parts


def find_experts(model: nn.Module) -> dict[nn.Module, DecodeExperts]:
    """What computes the quantized experts of a model, by the modules that are called for them.

    Sharded ones are left out: each rank has some of them (sharding/by_rows.py).
    """
    found: dict[nn.Module, DecodeExperts] = {}
    inner: set[nn.Module] = set()
    for module in model.modules():  # an adapter comes before what it adapts
        if module in inner:
            continue
        experts = module.get_base_layer() if isinstance(module, ExpertLora) else module
        names = expert_weight_names(experts)
        if not names or why_not_coded(experts) is not None:
            continue
        inner.update(module.modules())
        weight = getattr(experts, names[0])
        if shard_group(weight.codes) is None:
            found[module] = DecodeExperts(experts, module.adapters() if isinstance(module, ExpertLora) else {})
    return found


class DecodeLayers:
    """All quantized layers of a model, as they compute while text is generated.

    A training model may compute several layers together (rewire.py), in ways that save memory for backward. Here each
    computes for itself, and nothing is kept.

    Args:
        model: with its weights, sharded or not. Collective if it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forwards: dict[nn.Module, DecodeLinear] = {}
        self.mlps: dict[nn.Module, GatedMlp] = {}
        for module in model.modules():
            self._find_adapted(module)
            forward = vars(module).get("forward")
            if isinstance(forward, GatedMlp):
                self.mlps[module] = forward
        adapted = {layer.base_layer for layer in self.forwards}
        for module in model.modules():
            if isinstance(module, QuantizedLinear) and module not in adapted:
                self.forwards[module] = DecodeLinear(DecodeGroup([module]))
        self.groups = [forward.group for forward in self.forwards.values() if forward.number == 0]
        self.experts = find_experts(model)

    def _find_adapted(self, parent: nn.Module) -> None:
        """The children of a module that have adapters, those with the same input together."""
        parts = _adapted_children(parent)
        groups: list[tuple[str, ...]] = [names for names in (QKV, GATE_UP) if parts.keys() >= set(names)]
        together = set(chain.from_iterable(groups))
        groups += [(name,) for name in parts if name not in together]
        for names in groups:
            found = [parts[name] for name in names]
            group = DecodeGroup([part.layer for part in found], found)
            for number, name in enumerate(names):
                self.forwards[parent.get_submodule(name)] = DecodeLinear(group, number)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapters as they are now, many with one kernel."""
        for experts in self.experts.values():
            experts.refresh()
        parts: list[LoraPart] = []
        a: list[Tensor] = []
        b: list[Tensor] = []
        for group in self.groups:
            group.allocate()
            parts += group.parts
            a += group.a
            b += group.b
        for start in range(0, len(parts), REFRESHED):
            some = slice(start, start + REFRESHED)
            lora_a = [gather_whole(part.lora_a.weight, a[0].device) for part in parts[some]]
            torch._foreach_copy_(a[some], lora_a)
            lora_b = [local_tensor(part.lora_b.weight) for part in parts[some]]
            scalings = [part.scaling for part in parts[some]]
            torch._foreach_copy_(b[some], torch._foreach_mul(lora_b, scalings))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it lasts, the layers compute so, with the adapters as they were when it began."""
        self.refresh()
        forwards: dict[nn.Module, Callable[..., Tensor]] = {**self.forwards, **self.experts}
        forwards |= {module: mlp.plain for module, mlp in self.mlps.items()}
        with replaced((module, "forward", forward) for module, forward in forwards.items()):
            try:
                yield
            finally:
                for group in self.groups:
                    group.outputs.forget()
