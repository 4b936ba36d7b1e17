"""4-bit quantization on a CPU: the same bytes as bitsandbytes' `quantize_4bit`, several times as fast.

bitsandbytes has no CPU kernel for it. It searches the code book for each value with `torch.bucketize`, which takes 50
ns per value, an hour for 70B. Here the range of values is cut into small bins. A bin holds at most one bound between
two codes, so one look into a table and one comparison find the code.
"""

from __future__ import annotations

from functools import cache

import bitsandbytes.functional as bnb
import torch
from torch import Tensor

BINS = 2048  # that [-1, 1] is cut into: enough that none holds two of a format's 15 bounds
VALUES_A_TIME = 2**20  # few enough that the temporary tensors fit a cache


def quantize_4bit(weight: Tensor, quant_type: str, blocksize: int) -> tuple[Tensor, Tensor]:
    """Quantize rows on the CPU.

    Args:
        weight: bfloat16, float16 or float32 [rows, in_features], with whole blocks in a row.
        quant_type: `nf4` or `fp4`.
        blocksize: values that share a scale.

    Returns:
        packed: uint8 [rows, in_features / 2].
        absmax: float32 [rows, in_features / blocksize].
    """
    rows, in_features = weight.shape
    bounds, codes = _tables(quant_type)
    packed = torch.empty(rows, in_features // 2, dtype=torch.uint8)
    absmax = torch.empty(rows, in_features // blocksize, dtype=torch.float32)
    step = max(1, VALUES_A_TIME // in_features)
    for start in range(0, rows, step):
        blocks = weight[start : start + step].float().reshape(-1, blocksize)
        scales = blocks.abs().amax(1)
        scaled = (blocks * (1.0 / scales.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1).nan_to_num_(1.0).view(-1)
        bins = _bin_of(scaled)
        found = codes.index_select(0, bins.mul(2).add_(scaled > bounds.index_select(0, bins)))
        pairs = found.view(torch.int16)  # the first of the two codes is in the low byte
        packed[start : start + step] = ((pairs << 4) | (pairs >> 8)).to(torch.uint8).view(-1, in_features // 2)
        absmax[start : start + step] = scales.view(-1, in_features // blocksize)
    return packed, absmax


def _bin_of(scaled: Tensor) -> Tensor:
    """The bin of each value, int32 in [0, BINS]. Values in other bins than a bound's need no comparison."""
    return scaled.mul(BINS / 2).add_(BINS / 2).to(torch.int32)


@cache
def _tables(quant_type: str) -> tuple[Tensor, Tensor]:
    """Two tables.

    Returns:
        bounds: float32 [BINS + 1], the bound in each bin; 2.0, which no value exceeds, in a bin without one.
        codes: uint8 [2 * (BINS + 1)], for each bin the code up to its bound and the code above it.
    """
    book = bnb.get_4bit_type(quant_type, device="cpu").float()
    order = torch.argsort(book)
    between = (book[order[:-1]] + book[order[1:]]) / 2
    at = _bin_of(between).long()
    assert len(at.unique()) == len(between), quant_type
    bounds = torch.full((BINS + 1,), 2.0, dtype=torch.float32)
    bounds[at] = between
    below = (at < torch.arange(BINS + 1).unsqueeze(1)).sum(1)
    ranks = torch.stack([below, below + 1], 1).flatten().clamp_(max=len(between))
    return bounds, order[ranks].to(torch.uint8)
