"""Weights rounded at random: right on average, the same in any pieces, and on the points of bitsandbytes' format."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from qlora_fsdp.inference import merge_formats
from qlora_fsdp.inference.rounding import draw_uniform


def round_at_random(values: torch.Tensor, quant_type: str, name: str, first_element: int) -> torch.Tensor:
    """With the numbers of a weight's name, as `merge` draws them."""
    drawn = draw_uniform(name, first_element, values.numel()).view_as(values)
    return merge_formats.round_at_random(values, quant_type, drawn)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_codes_are_those_of_neighbouring_points(quant_type: str):
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    rounded = round_at_random(weight, quant_type, "a.weight", 0)
    codes, state = bnb.quantize_4bit(rounded, quant_type=quant_type)
    torch.testing.assert_close(bnb.dequantize_4bit(codes, state), rounded)
    scale = weight.view(-1, 64).abs().amax(1, keepdim=True)
    points = bnb.get_4bit_type(quant_type, device="cpu").float().unique()
    widest = float(points.diff().max())
    assert ((rounded - weight).view(-1, 64).abs() <= widest * scale).all()


def test_pieces_get_the_numbers_of_the_whole():
    weight = torch.randn(9, 128)
    whole = round_at_random(weight, "nf4", "a.weight", 0)
    pieces = [round_at_random(weight[start : start + 4], "nf4", "a.weight", start * 128) for start in (0, 4, 8)]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(round_at_random(weight, "nf4", "another.weight", 0), whole)


def test_values_are_right_on_average():
    row = torch.linspace(-1, 1, 64).view(1, 64)
    names = range(4000)
    mean = torch.stack([round_at_random(row, "nf4", str(name), 0) for name in names]).mean(0)
    torch.testing.assert_close(mean, row, rtol=0, atol=0.01)  # four times its spread


def test_points_stay_as_they_are():
    points = bnb.get_4bit_type("nf4", device="cpu").float().repeat(4).view(1, 64) * 3
    assert torch.equal(round_at_random(points, "nf4", "a.weight", 0), points)
    zeros = torch.zeros(1, 64)
    assert torch.equal(round_at_random(zeros, "nf4", "a.weight", 0), zeros)
