"""Rounding at random, up or down in proportion, with numbers that belong to a weight's name and a value's place in it.

So a weight can be rounded in pieces of any size, and a merge that was cut off goes on with the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

SEED = 0
NUMBERS_A_STEP = 8  # float32 numbers that one step of Philox's counter gives


def round_to_points(scaled: Tensor, points: Tensor, drawn: Tensor) -> Tensor:
    """Move each value to one of the two points of a grid between which it lies.

    Args:
        scaled: float32 [...]; what is beyond the first or the last point becomes that one.
        points: float32 [n], ascending.
        drawn: numbers in [0, 1), one for each value, of the same shape (`draw_uniform`).
    """
    upper = torch.bucketize(scaled, points).clamp_(1, len(points) - 1)
    lower = upper - 1
    share = (scaled - points[lower]) / (points[upper] - points[lower])
    chosen: Tensor = points[torch.where(drawn < share, upper, lower)]
    return chosen


def round_to_16_bits(values: Tensor, dtype: torch.dtype, name: str, first_element: int) -> Tensor:
    """Round each value of a weight to one of the two numbers of a 16-bit dtype between which it lies, at random.

    A base in 16 bits lies on these numbers, which are 0.4 % apart in bfloat16. Most of what a short training at a low
    learning rate adds is less than half of that, and rounding to the nearest would take it away.

    Args:
        values: float32 [rows, columns], consecutive whole rows of a weight.
        dtype: bfloat16 or float16.
        name: the weight's name, to which the random numbers belong.
        first_element: how many elements of the weight are before these.

    Returns:
        Values of the same shape, in `dtype`.
    """
    nearest = values.to(dtype)
    as_float = nearest.float()
    is_beyond = values.abs() > as_float.abs()  # the other one is further from zero: one more in the bits
    bits = nearest.view(torch.int16)
    other = (bits + torch.where(is_beyond, 1, -1).to(torch.int16)).view(dtype)
    gap = (other.float() - as_float).abs()
    share = (values - as_float).abs() / gap
    drawn = draw_uniform(name, first_element, values.numel()).to(values.device).view_as(values)
    is_moved = (drawn < share) & (as_float != 0) & gap.isfinite()
    return torch.where(is_moved, other, nearest)


def draw_uniform(name: str, first: int, count: int) -> Tensor:
    """Numbers in [0, 1) of a weight, from the given one on: float32 [count]."""
    key = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    bits.advance(first // NUMBERS_A_STEP)
    skipped = first % NUMBERS_A_STEP
    numbers = np.random.Generator(bits).random(skipped + count, dtype=np.float32)
    return torch.from_numpy(numbers[skipped:])
