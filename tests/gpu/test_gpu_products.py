"""Products with codes on a GPU, with the tiles that the rule gives: against float64, launched and recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers.decode_linear import DecodeGroup, DecodeLayers, products_tile
from qlora_fsdp.layers.kernels.triton_products import Tile, best_tile, many_rows_tile
from qlora_fsdp.layers.quantized.format import Format
from tests.helpers.fused import make_parts
from tests.helpers.products import compare, sorted_rows
from tests.helpers.quantized import make_quantized

ROUNDED = 3e-3  # of the norm: results in bfloat16 alone are 1.7e-3 away
FORMATS = [
    Format("nf4", True),
    Format("nf4"),
    Format("fp4", True),
    Format("nf4", blocksize=32),
    Format("nf4", True, 128),
    Format("fp4", blocksize=256),
    Format("int4", blocksize=32),
    Format("int4", blocksize=128),
    Format("mxfp4", blocksize=32),
    Format("int8"),
]


def tile_for(format: Format, outputs: list[int], width: int, rows: int) -> Tile:
    tile = best_tile(sum(outputs), width, rows, format.blocksize, format.is_4bit, 132)
    assert tile is not None
    return tile


@pytest.mark.parametrize("rows", [(1, 7, 16), (17, 31), (33, 64), (100, 128, 200)], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_products_are_those_of_float64(format: Format, rows: tuple[int, ...]) -> None:
    """Three weights of unlike, ragged heights with biases and adapters; and one alone."""
    outputs = [1000, 72, 200]
    for number in rows:
        tile = tile_for(format, outputs, 1536, number)
        assert compare(format, outputs, 1536, number, tile, True, 20, device="cuda", dtype=torch.bfloat16) < ROUNDED
        tile = tile_for(format, [520], 2560, number)
        assert compare(format, [520], 2560, number, tile, False, 0, device="cuda", dtype=torch.bfloat16) < ROUNDED


@pytest.mark.parametrize("rows", [7, 64])
def test_products_of_float16(rows: int) -> None:
    format = Format("nf4", True)
    tile = tile_for(format, [520], 2560, rows)
    assert compare(format, [520], 2560, rows, tile, True, 16, device="cuda", dtype=torch.float16) < ROUNDED


@pytest.mark.parametrize("width", [64, 192, 320, 2880])
@pytest.mark.parametrize("rows", [2, 20, 60, 128])
def test_widths_that_few_steps_divide(width: int, rows: int) -> None:
    """Odd numbers of quantized scales a row are filled up to whole units of the storage dtype."""
    for format in (Format("nf4", True), Format("nf4"), Format("int8")):
        tile = tile_for(format, [136], width, rows)
        assert compare(format, [136], width, rows, tile, True, 8, device="cuda", dtype=torch.bfloat16) < ROUNDED


@pytest.mark.parametrize("format", FORMATS[:3], ids=str)
def test_products_of_experts(format: Format) -> None:
    ends = sorted_rows([3, 0, 40, 17, 1, 0, 130, 9], "cuda")
    for tile in (Tile(32, 16, 4, 1, 2, 3), Tile(64, 64, 1, 1, 4, 5)):
        error = compare(format, [8 * 200], 512, 200, tile, True, 0, ends, device="cuda", dtype=torch.bfloat16)
        assert error < ROUNDED


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 128])
@pytest.mark.parametrize("format", [Format("nf4", True), Format("int8")], ids=str)
def test_a_recorded_product_repeats_itself(format: Format, rows: int) -> None:
    """Sums that are split are added in one order, and the counts are zeros again for the next replay."""
    torch.manual_seed(rows)
    layer = make_quantized(torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16), format, bias=True)
    group = DecodeGroup([layer])
    group.allocate()
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    tile = products_tile([layer], x)
    assert tile is not None and tile.split > 1
    launched = group.output(0, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = group.output(0, x)
    for _ in range(2):
        graph.replay()
        assert torch.equal(recorded, launched)
    x.copy_(torch.randn(rows, 4096, device="cuda"))
    graph.replay()
    assert layer.bias is not None
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert (recorded - expected).norm() < 4e-3 * expected.norm()  # the dequantized weight is rounded, too


@pytest.mark.parametrize("rows", [5, 8, 12, 100])
@pytest.mark.parametrize("format", [Format("nf4", True), Format("int8")], ids=str)
def test_adapted_layers_follow_their_adapters_in_a_graph(format: Format, rows: int) -> None:
    """Layers with one input are one launch, and the graph sees the adapters as `refresh` has written them last."""
    ours, reference = make_parts(format, "silu", torch.bfloat16, "cuda")
    layers = DecodeLayers(ours)
    x = torch.randn(rows, 128, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), layers.in_use():
        assert all(products_tile(group.layers, _input(group, rows)) is not None for group in layers.groups)
        launched = ours(x)
        with torch.cuda.graph(graph):
            recorded = ours(x)
    for found in (launched, recorded, recorded):
        graph.replay()
        expected = reference(x.cpu().double()).detach()
        assert (found.cpu() - expected).norm() < 1e-2 * expected.norm()
        if found is launched:
            continue
        for name, parameter in ours.named_parameters():
            if "lora_" in name:
                parameter.data += 0.1
                reference.get_parameter(name).data += 0.1
        layers.refresh()


def _input(group: DecodeGroup, rows: int) -> Tensor:
    return torch.empty(rows, group.layers[0].in_features, device="cuda", dtype=torch.bfloat16)


def test_who_computes_what() -> None:
    """The rule: one row of a small weight, many rows and float32 are not for the kernel."""

    def is_ours(rows: int, width: int, format: Format, dtype: torch.dtype = torch.bfloat16) -> bool:
        layer = make_quantized(torch.zeros(width, width, device="cuda", dtype=dtype), format)
        return products_tile([layer], torch.empty(rows, width, device="cuda", dtype=dtype)) is not None

    nested, int8 = Format("nf4", True), Format("int8")
    assert [is_ours(rows, 4096, nested) for rows in (1, 2, 128, 129)] == [False, True, True, False]
    assert [is_ours(rows, 8192, nested) for rows in (1, 128)] == [True, True]
    assert [is_ours(rows, 4096, int8) for rows in (1, 256, 257)] == [True, True, False]
    assert [is_ours(rows, 1024, nested) for rows in (1, 4, 5)] == [False, False, True]
    assert not is_ours(8, 4096, nested, torch.float32)
    half = make_quantized(torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16), Format("nf4"))
    other = make_quantized(torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16), nested)
    assert products_tile([half, other], torch.empty(8, 4096, device="cuda", dtype=torch.bfloat16)) is None


def test_layers_without_adapters() -> None:
    model = nn.Sequential(make_quantized(torch.randn(4096, 4096, device="cuda").bfloat16(), Format("nf4", True)))
    x = torch.randn(32, 4096, device="cuda").bfloat16()
    with torch.no_grad():
        expected = model(x)
        with DecodeLayers(model).in_use():
            found = model(x)
    assert (found - expected).double().norm() < 5e-3 * expected.double().norm()


@pytest.mark.parametrize("rows", [129, 200, 256])
@pytest.mark.parametrize("format", [Format("nf4", True), Format("fp4"), Format("nf4", True, 128)], ids=str)
def test_many_rows_of_wide_weights(format: Format, rows: int) -> None:
    """All rows are one tile, and the weight is multiplied with its scales, which rounds it."""
    tile = many_rows_tile(16_384, 1536, format.blocksize)
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the rule is for Hopper")
    assert tile is not None and tile.rows == 256
    found = compare(format, [9000, 7384], 1536, rows, tile, True, 20, device="cuda", dtype=torch.bfloat16)
    assert found < 3.5e-3
