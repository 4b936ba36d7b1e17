"""Products with codes, compared with those of float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from qlora_fsdp.layers.kernels.triton_products import Tile, products, split_even_odd
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.stored_weight import code_books, code_values, weight_codes
from tests.helpers.quantized import make_quantized


def divided(number: int, size: int) -> int:
    """Rounded up."""
    return -(number // -size)


def sorted_rows(numbers: Sequence[int], device: str = "cpu") -> Tensor:
    """One past the last row of each expert, of their numbers of rows."""
    return torch.tensor(list(accumulate(numbers)), dtype=torch.int32, device=device)


def compare(
    format: Format,
    outputs: Sequence[int],
    width: int,
    rows: int,
    tile: Tile,
    bias: bool,
    rank: int,
    ends: Tensor | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest distance of a weight's product from that of float64, as a part of its norm.

    Args:
        format: of all weights.
        outputs: of each weight; of all experts together, with `ends`.
        width: columns of the weights.
        rows: of x.
        tile: divides the work.
        bias: whether there are biases.
        rank: of adapters; 0: none.
        ends: one past each expert's last row.
        device: a GPU, or Triton's interpreter computes the product.
        dtype: of x and the results.
    """
    torch.manual_seed(rows + width)
    num_experts = 1 if ends is None else len(ends)
    layers = [make_quantized(torch.randn(num, width, device=device).to(dtype), format, bias) for num in outputs]
    x = torch.randn(rows, width, device=device).to(dtype)
    counts = torch.zeros(4096, dtype=torch.int32, device=device)
    h: Tensor | None = None
    b: list[Tensor] = []
    if rank:
        h = torch.randn(rows, rank * len(layers), device=device).to(dtype)
        b = [torch.randn(num, rank, device=device).to(dtype) for num in outputs]
    found = products(
        split_even_odd(x) if format.is_4bit else x,
        [weight_codes(layer, layer.bias) for layer in layers],
        code_values(format),
        code_books(format, dtype, x.device),
        format.blocksize,
        tile,
        counts,
        h,
        b,
        ends,
        interprets=device == "cpu",
    )
    assert not counts.any()
    lows = [None] * len(layers) if h is None else h.double().split(rank, 1)
    errors = []
    for number, (layer, y) in enumerate(zip(layers, found, strict=True)):
        weight = format.dequantize(layer.named_parts(), layer.out_features, width, torch.float32).double()
        by_expert = weight.view(num_experts, -1, width)
        biases = torch.zeros(layer.out_features, dtype=torch.float64, device=device)
        if layer.bias is not None:
            biases = layer.bias.double()
        expected = torch.empty(y.shape, dtype=torch.float64, device=device)
        first = 0
        low = lows[number]
        for expert, last in enumerate([rows] if ends is None else ends.tolist()):
            some = slice(first, last)
            expected[some] = F.linear(x[some].double(), by_expert[expert], biases.view(num_experts, -1)[expert])
            if low is not None:
                expected[some] += low[some] @ b[number].double().view(num_experts, -1, rank)[expert].t()
            first = last
        errors.append(float((y.double() - expected).norm() / expected.norm()))
    return max(errors)
