"""The quantized linear layer and LoRA over it against plain autograd on the dequantized weight, in float64."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import peft
import pytest
import torch
from peft.tuners import lora
from tests.helpers.quantized import make_quantized
from torch import Tensor, nn

from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear

FORMATS = [
    Format("nf4", True),
    Format("fp4"),
    Format("int8", storage=torch.float32),
    Format("nf4", storage=torch.uint8),
]


def make_layer(format: Format, bias: bool) -> tuple[QuantizedLinear, Tensor]:
    """A layer [96, 128] filled from a random weight, and the weight that bitsandbytes itself dequantizes to."""
    torch.manual_seed(0)
    weight = torch.randn(96, 128).mul_(0.1)
    layer = make_quantized(weight, format, bias)
    if not format.is_4bit:
        stock_codes, absmax, _ = bnb.int8_vectorwise_quant(weight.half())
        return layer, stock_codes.float() * absmax[:, None] / 127
    packed, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=format.double_quant, quant_type=format.quant_type
    )
    return layer, bnb.dequantize_4bit(packed, state)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_weight_is_bitsandbytes_own(format: Format):
    layer, expected = make_layer(format, bias=False)
    torch.testing.assert_close(layer.weight, expected, rtol=1e-6, atol=0)


def test_int8_is_rounded_once():
    """As bitsandbytes' backward does: a scale in bfloat16 would make a whole row up to 0.4 % too long or short."""
    weight, format = torch.randn(96, 128), Format("int8")
    codes, absmax, _ = bnb.int8_vectorwise_quant(weight.half())
    expected = codes.bfloat16().mul_(absmax.unsqueeze(1).mul(1.0 / 127.0))
    ours = dict(zip(("codes", "scales"), format.quantize_rows(weight), strict=True))
    assert format.dequantize(ours, 96, 128, torch.bfloat16).equal(expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_linear(format: Format, bias: bool):
    layer, weight = make_layer(format, bias)
    x = torch.randn(3, 5, 128, requires_grad=True)
    grad = torch.randn(3, 5, 96)
    y = layer(x)
    y.backward(grad)
    expected = x.detach().double() @ weight.double().T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight.double(), rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS[:3], ids=str)
def test_lora_gradients(format: Format, bias: bool):
    layer, weight = make_layer(format, bias)
    ours = LoraLinear(layer, "default", peft.LoraConfig(r=8, lora_alpha=24), r=8, lora_alpha=24)
    plain = nn.Linear(128, 96, bias=bias, dtype=torch.float64)
    plain.weight.data = weight.double()
    if bias:
        plain.bias.data = layer.bias.double()
    reference = lora.Linear(plain, "default", peft.LoraConfig(r=8, lora_alpha=24), r=8, lora_alpha=24).double()
    for kind in ("lora_A", "lora_B"):
        values = torch.randn(getattr(ours, kind)["default"].weight.shape).mul_(0.1)
        getattr(ours, kind)["default"].weight.data = values
        getattr(reference, kind)["default"].weight.data = values.double()

    x = torch.randn(2, 7, 128, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    grad = torch.randn(2, 7, 96)
    y, expected = ours(x), reference(x64)
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
    for kind in ("lora_A", "lora_B"):
        found, wanted = getattr(ours, kind)["default"].weight.grad, getattr(reference, kind)["default"].weight.grad
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_nothing_dequantized_is_kept_for_backward():
    layer, _ = make_layer(Format("nf4", True), bias=True)
    adapted = LoraLinear(layer, "default", peft.LoraConfig(r=8), r=8, lora_alpha=8)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 7, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for module in (layer, adapted):
            module(x)
    assert kept and all(tensor.numel() < 96 * 128 for tensor in kept)


def test_rows_that_blocks_would_cross_are_refused():
    assert "in_features=96" in (Format("nf4").why_not(96) or "")
    assert Format("int8").why_not(96) is None and Format("fp4").why_not(128) is None


def test_merging_into_codes_is_refused():
    layer, _ = make_layer(Format("nf4", True), bias=False)
    with pytest.raises(NotImplementedError, match="use qlora-fsdp merge"):
        LoraLinear(layer, "default", peft.LoraConfig(r=8), r=8, lora_alpha=8).merge()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_cpu_codes_are_bitsandbytes_own(quant_type: str, dtype: torch.dtype):
    """Random rows; each bound between two codes and its neighbours; zeros, the smallest numbers, what is not finite."""
    book = bnb.get_4bit_type(quant_type, device="cpu").sort().values
    bounds = (book[1:] + book[:-1]) / 2
    near = torch.stack([bounds, *(bounds.nextafter(torch.full_like(bounds, end)) for end in (-1, 1))]).flatten()
    special = torch.cat([torch.ones(1), near, book, torch.zeros(2)]).view(1, 64)
    weight = torch.cat([torch.randn(70, 64), special, torch.zeros(1, 64), torch.full((1, 64), 1e-40)]).repeat(1, 2)
    weight[0, 1], weight[1, 2] = torch.nan, torch.inf
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit.default(weight.to(dtype), 64, quant_type, torch.uint8)
    ours, scales = Format(quant_type, storage=torch.uint8).quantize_rows(weight.to(dtype))
    assert torch.equal(ours.flatten(), packed.flatten())
    torch.testing.assert_close(scales.flatten(), absmax.flatten(), rtol=0, atol=0, equal_nan=True)
