"""Weights that are dequantized one ahead, and kept: which ones, when, and that the results are the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from tests.helpers.quantized import make_quantized
from torch import Tensor, nn

from qlora_fsdp.layers.quantized import weight_reader
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.quantized.weight_reader import WeightReader

CPU = torch.device("cpu")


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    weights = torch.randn(3, 64, 64)
    return nn.Sequential(*(make_quantized(weight, Format("nf4", True)) for weight in weights))


def run(layers: nn.Module) -> tuple[list[str], Tensor]:
    """What is done in forward and backward, by the names of the layers, and the gradient of the input."""
    names, done = {layer: name for name, layer in layers.named_children()}, []
    dequantize = QuantizedLinear.dequantize

    def dequantized(layer: QuantizedLinear) -> Tensor:
        done.append(f"dequantize {names[layer]}")
        return dequantize(layer)

    for layer in layers:  # hooks run after a layer's product
        layer.register_forward_hook(lambda layer, *_: done.append(f"product {names[layer]}"))
        layer.register_full_backward_hook(lambda layer, *_: done.append(f"gradient {names[layer]}"))
    x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
    with patch.object(QuantizedLinear, "dequantize", dequantized):
        layers(x).sum().backward()
    return done, x.grad


def forget_hooks(layers: nn.Module) -> None:
    for layer in layers:
        layer._forward_hooks.clear()
        layer._backward_hooks.clear()


def test_a_weight_is_dequantized_before_the_product_with_the_one_before_it(layers: nn.Sequential):
    reader = WeightReader(layers, CPU)
    with reader.noting():
        one_by_one, expected = run(layers)
    assert one_by_one[:4] == ["dequantize 0", "product 0", "dequantize 1", "product 1"]
    assert reader.order == [*layers, *reversed(layers)]
    forget_hooks(layers)
    with reader.reading():
        one_ahead, found = run(layers)
    assert one_ahead == [
        *("dequantize 0", "dequantize 1", "product 0", "dequantize 2", "product 1", "dequantize 2", "product 2"),
        *("dequantize 1", "gradient 2", "dequantize 0", "gradient 1", "gradient 0"),
    ]
    assert torch.equal(found, expected)
    assert all(layer.reader is None for layer in layers)


def test_what_reads_in_another_order_dequantizes_for_itself(layers: nn.Sequential):
    reader, first, last = WeightReader(layers, CPU), layers[0], layers[2]
    with reader.noting():
        assert torch.equal(first.weight, first.dequantize())
        assert torch.equal(last.weight, last.dequantize())
    for read in ([last, first], [first, layers[1]], [first, first], [first, last, last, first]):
        with reader.reading():
            for layer in read:
                assert torch.equal(layer.weight, layer.dequantize())


def test_rows_that_other_ranks_have_are_not_read_ahead(layers: nn.Sequential):
    """As where FSDP has not gathered the next layer yet (test_replayed_passes.py does it with FSDP)."""
    reader, read = WeightReader(layers, CPU), []
    with reader.noting():
        run(layers)
    dequantize = QuantizedLinear.dequantize
    with (
        patch.object(weight_reader, "_is_whole", lambda layer: layer is not layers[1]),
        patch.object(QuantizedLinear, "dequantize", lambda layer: read.append(layer) or dequantize(layer)),
        reader.reading(),
    ):
        first = layers[0].weight
        assert read == [layers[0]]
        second = layers[1].weight
    assert read == [layers[0], layers[1], layers[2]]
    assert not torch.equal(first, second)


def test_the_memory_of_the_second_weight_counts_its_scales(layers: nn.Sequential):
    reader = WeightReader(layers, CPU)
    assert reader.ahead_bytes == 0  # nothing was noted
    with reader.noting():
        run(layers)
    assert reader.ahead_bytes == 64 * 64 * 4 + 64 * 4


def test_kept_weights_are_dequantized_once(layers: nn.Sequential):
    reader = WeightReader(layers, CPU, keeping=layers[1:])
    with reader.noting():
        _, expected = run(layers)
    forget_hooks(layers)
    with reader.reading():
        done, found = run(layers)
    assert done == [
        *("dequantize 0", "dequantize 1", "product 0", "dequantize 2", "product 1", "product 2"),
        *("gradient 2", "dequantize 0", "gradient 1", "gradient 0"),
    ]
    assert torch.equal(found, expected)
    forget_hooks(layers)
    with reader.reading(keeps=False), torch.no_grad():
        for layer in layers:
            assert torch.equal(layer.weight, layer.dequantize())
            assert len(reader._ready) == 1  # the next one alone
    with reader.reading():
        assert not reader._ready


def test_held_weights_are_dequantized_once_for_all_passes(layers: nn.Sequential):
    reader = WeightReader(layers, CPU, keeping=layers[1:], holds=True)
    with reader.noting():
        _, expected = run(layers)
    reader.keep_within(1e6)
    reader.hold()
    assert list(reader.held) == list(layers[1:])
    for _ in range(2):
        forget_hooks(layers)
        with reader.reading():
            done, found = run(layers)
        assert done == [
            *("dequantize 0", "product 0", "product 1", "product 2", "gradient 2"),
            *("dequantize 0", "gradient 1", "gradient 0"),
        ]
        assert torch.equal(found, expected)
    with reader.reading(keeps=False), torch.no_grad():  # as in an evaluation
        assert layers[1].weight is layers[1].weight
        assert torch.equal(layers[1].weight, layers[1].dequantize())
    reader.release()
    with reader.reading(keeps=False), torch.no_grad():
        assert layers[1].weight is not layers[1].weight


def test_weights_that_there_is_no_memory_to_hold_are_kept_until_backward(layers: nn.Sequential):
    reader = WeightReader(layers, CPU, keeping=layers, holds=True)
    with reader.noting():
        run(layers)
    reader.keep_within(1e6)
    given = [layers[0].dequantize(), torch.OutOfMemoryError("none left")]
    with patch.object(QuantizedLinear, "dequantize", side_effect=given):
        reader.hold()
    assert not reader.held and not reader.holds
    forget_hooks(layers)
    with reader.reading():
        done, _ = run(layers)
    assert sorted(text for text in done if "dequantize" in text) == ["dequantize 0", "dequantize 1", "dequantize 2"]


@pytest.mark.parametrize("holds", [False, True])
def test_a_weight_that_is_read_once_a_pass_is_held_and_not_kept(layers: nn.Sequential, holds: bool):
    reader = WeightReader(layers, CPU, keeping=layers, holds=holds)
    with reader.noting(), torch.no_grad():
        for layer in layers:
            layer(torch.ones(1, 64))
    reader.keep_within(1e6)
    assert reader.kept == (list(layers) if holds else [])


@pytest.mark.parametrize(("num_weights", "num_kept"), [(-1, 0), (0, 0), (0.9, 0), (1, 1), (1.9, 1), (2, 2), (3, 2)])
def test_the_last_weights_that_are_read_again_are_kept_as_far_as_there_is_room(
    layers: nn.Sequential, num_weights: float, num_kept: int
):
    reader = WeightReader(layers, CPU, keeping=layers)
    with reader.noting(), torch.no_grad():
        for index in (0, 1, 2, 2, 1):  # the first one is not read again
            layers[index](torch.ones(1, 64))
    reader.keep_within(reader.ahead_bytes + num_weights * layers[0].weight_bytes)
    assert reader.kept == list(layers[3 - num_kept :])
