"""Products while text is generated: bitsandbytes' own with codes, and layers that follow their adapters."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.fused import adapt, make_parts
from tests.helpers.quantized import make_quantized
from torch import Tensor, nn
from torch.nn import functional as F

from qlora_fsdp.layers import decode_linear
from qlora_fsdp.layers.decode_linear import DecodeLayers, has_whole_blocks, product_with_codes
from qlora_fsdp.layers.kernels.launch import HAS_TRITON
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.rewire import fuse_layers


def quantized(format: Format, in_features: int = 128) -> QuantizedLinear:
    torch.manual_seed(0)
    return make_quantized(torch.randn(96, in_features), format, bias=True)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.uint8])
def test_products_with_codes(quant_type: str, double_quant: bool, storage: torch.dtype):
    layer = quantized(Format(quant_type, double_quant, storage=storage))  # type: ignore[arg-type]
    assert has_whole_blocks(layer)
    x = torch.randn(3, 128)
    expected = F.linear(x, layer.weight, layer.bias)
    assert (product_with_codes(layer, x) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_weights_whose_codes_are_not_multiplied_as_they_are():
    assert not has_whole_blocks(quantized(Format("int8")))
    assert not has_whole_blocks(quantized(Format("nf4", double_quant=True), 192))  # 3 scales a row, in units of 2 bytes
    assert has_whole_blocks(quantized(Format("nf4", double_quant=True, storage=torch.uint8), 192))


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("format", [Format("nf4", double_quant=True), Format("int8")], ids=str)
def test_layers_follow_their_adapters_and_are_put_back(format: Format, fuses: bool):
    """A layer that was fused for training, too; `refresh` writes where a recorded graph reads."""
    ours, reference = make_parts(format, "silu", torch.float32, "cpu")
    if fuses:
        assert fuse_layers(ours) == 2
    layers, x = DecodeLayers(ours), torch.randn(2, 5, 128)
    places = None
    for _ in range(2):
        with torch.no_grad():
            expected = reference(x.double())
            with layers.in_use():
                found = ours(x)
        assert (found - expected).norm() < 1e-5 * expected.norm()
        now = [copy.data_ptr() for group in layers.groups for copy in (*group.a, *group.b)]
        assert len(layers.groups) == 3 and len(set(now)) == 12 and places in (None, now)  # q, k, v; gate, up; down
        places = now
        for name, parameter in ours.named_parameters():  # as an optimizer would
            if "lora_" in name:
                parameter.data += 0.1
                reference.get_parameter(name).data += 0.1
    y = ours(x.requires_grad_())
    y.sum().backward()  # training goes on as before
    assert all(p.grad is not None for name, p in ours.named_parameters() if "lora_" in name)
    assert (y - reference(x.double())).norm() < 1e-5 * y.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows_take_two_kernels_for_all_adapters(monkeypatch: pytest.MonkeyPatch, rows: int):
    """In Triton's interpreter, and with bitsandbytes' product on the CPU."""
    kernels = pytest.importorskip("qlora_fsdp.layers.kernels.triton_low_rank")
    monkeypatch.setattr(kernels, "TILE", 512)
    monkeypatch.setattr(decode_linear, "multiplies_codes", lambda layer, x: True)
    num_layers, add_second = [], kernels.add_second

    def watched(h_NR: Tensor, factors: list[Tensor], outputs: list[Tensor]) -> None:
        num_layers.append(len(factors))
        add_second(h_NR, factors, outputs)

    monkeypatch.setattr(kernels, "add_second", watched)
    ours, reference = make_parts(Format("nf4"), "silu", torch.float32, "cpu")
    x = torch.randn(rows, 128)
    with torch.no_grad(), DecodeLayers(ours).in_use():
        found = ours(x)
        expected = reference(x.double())
    assert num_layers == [3, 2, 1]  # q, k and v; gate and up; down
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("format", [Format("nf4", double_quant=True), Format("int8")], ids=str)
def test_one_kernel_multiplies_layers_that_share_an_input(monkeypatch: pytest.MonkeyPatch, format: Format, rows: int):
    """In Triton's interpreter: q, k and v; gate and up; down. Ranks of adapters are unlike."""
    kernels = pytest.importorskip("qlora_fsdp.layers.kernels.triton_products")
    if not HAS_TRITON:
        pytest.skip("without Triton there are no kernels")
    tile = kernels.Tile(32, 32, 1, 2, 2, 3) if rows > 16 else kernels.Tile(32, 16, 1, 1, 2, 3)
    monkeypatch.setattr(decode_linear, "products_tile", lambda layers, x: tile)
    num_weights, products = [], kernels.products

    def watched(x_NI: Tensor, weights: list[object], *args: object, **options: object) -> list[Tensor]:
        num_weights.append(len(weights))
        found: list[Tensor] = products(x_NI, weights, *args, **options)
        return found

    monkeypatch.setattr(kernels, "products", watched)
    ours, reference = make_parts(format, "silu", torch.float32, "cpu")
    x = torch.randn(rows, 128)
    with torch.no_grad(), DecodeLayers(ours).in_use():
        found = ours(x)
        expected = reference(x.double())
    assert num_weights == [3, 2, 1]
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_nothing_changes_without_a_gpu():
    layer = quantized(Format("nf4"))
    assert decode_linear.products_tile([layer], torch.randn(8, 128, dtype=torch.bfloat16)) is None


def test_a_base_without_adapters():
    model = nn.Sequential(quantized(Format("nf4")), nn.ReLU())
    x = torch.randn(2, 128)
    expected = model(x)
    layers = DecodeLayers(model)
    assert len(layers.forwards) == 1
    with layers.in_use():
        assert torch.equal(model(x), expected)
    assert "forward" not in vars(model[0])


def test_adapters_that_are_computed_otherwise_are_left_alone():
    plain = adapt(nn.ModuleDict({"q_proj": nn.Linear(8, 8)}), ours=True)  # a base that is not quantized
    assert isinstance(plain.base_model.model["q_proj"], LoraLinear)
    assert not DecodeLayers(plain).forwards
