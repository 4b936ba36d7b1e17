"""How far the log-probabilities of answers as they were drawn are from those of training: counted by bins.

The mean says little where a few tokens are far apart. So tokens are counted by how far they are, in bins that ranks can
add, and the share below which 99 % are follows from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

MISMATCH = "sampling/sampling_logp_difference"
LEAST_POWER, NUM_BINS = -20, 49  # a bin for each factor of the root of 2 from 2**-20 on
SHARE = 0.99  # of tokens, of which the mismatch is told
BINS = tuple(f"{MISMATCH}/bin_{number}" for number in range(NUM_BINS))


def count_bins(mismatch: Tensor, mask: Tensor) -> Tensor:
    """How many tokens have a mismatch in each bin, and how many there are: float64 [NUM_BINS, 2]."""
    powers = 2 * (mismatch.clamp(min=2.0**LEAST_POWER).log2() - LEAST_POWER)
    bins = powers.floor().long().clamp(max=NUM_BINS - 1)
    counts = ((bins[:, None] == torch.arange(NUM_BINS, device=bins.device)) * mask[:, None]).double().sum(0)
    return torch.stack([counts, mask.double().sum().expand(NUM_BINS)], 1)


def mismatch_of_share(shares: Sequence[float]) -> float:
    """The mismatch that `SHARE` of the tokens are below, but for half a bin: the upper end of the bin it falls in.

    Args:
        shares: of all tokens, those in each bin.
    """
    reached = [number for number, total in enumerate(accumulate(shares)) if total >= SHARE]
    number = reached[0] if reached else len(shares) - 1
    return float(2.0 ** (LEAST_POWER + (number + 1) / 2)) if number else 0.0
