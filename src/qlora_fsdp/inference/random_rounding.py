"""Rounding to a 4-bit format at random, up or down in proportion, so that small changes are kept on average.

Weights that were dequantized lie on the grid of their format. What an adapter adds to them is far smaller than the
distance to the next point of that grid, so that rounding to the nearest point takes almost all of it away: of a real
model's gain 3 to 10 % were left. Rounded at random, with the probability that each of the two neighbours is near, the
weights are right on average, and 97 to 99 % of the gain are left. Weights in full precision need nothing of it, because
they lie anywhere between the points.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from qlora_fsdp.common.sizes import BLOCKSIZE
from qlora_fsdp.layers.quantized.format import code_book

SEED = 0
NUMBERS_A_STEP = 8  # float32 numbers that one step of Philox's counter gives


def round_at_random(values: Tensor, quant_type: str, name: str, first_element: int) -> Tensor:
    """Move each value of a weight to one of the two points of its block's grid between which it lies.

    The random numbers belong to the weight's name and to the place of a value in it. So a weight can be rounded in
    pieces of any size, and a merge that was cut off goes on with the same numbers.

    Args:
        values: float32 [rows, columns], consecutive whole rows of a weight; columns are a multiple of the block size.
        quant_type: nf4 or fp4, the format in which the weight is written.
        name: the weight's name.
        first_element: how many elements of the weight are before these.

    Returns:
        Values of the same shape. bitsandbytes' `quantize_4bit`, which rounds to the nearest, gives the codes of the
        points that were chosen.
    """
    points = code_book(quant_type, values.device).unique()  # ascending; fp4's book has zero twice
    blocks = values.reshape(-1, BLOCKSIZE)
    absmax = blocks.abs().amax(1, keepdim=True)
    scaled = blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny)
    upper = torch.bucketize(scaled, points).clamp(1, len(points) - 1)
    lower = upper - 1
    share = (scaled - points[lower]) / (points[upper] - points[lower])
    drawn = _draw(name, first_element, values.numel()).to(values.device).view_as(share)
    chosen = torch.where(drawn < share, upper, lower)
    rounded: Tensor = points[chosen] * absmax
    return rounded.view(values.shape)


def _draw(name: str, first: int, count: int) -> Tensor:
    """Numbers in [0, 1) of a weight, from the given one on: float32 [count]."""
    key = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    bits.advance(first // NUMBERS_A_STEP)
    return torch.from_numpy(np.random.Generator(bits).random(count, dtype=np.float32))
