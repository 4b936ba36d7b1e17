"""A GPU's time between two moments is that of what was queued between them, however far ahead the host is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from qlora_fsdp.training.step_recorder import Moment

pytestmark = pytest.mark.gpu

CYCLES = 10**8  # 50 ms or so


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_queued_between_two_moments_is_what_is_timed() -> None:
    device = torch.device("cuda")
    torch.cuda._sleep(10 * CYCLES)
    moments = [Moment(device)]
    for factor in (1, 10):
        torch.cuda._sleep(factor * CYCLES)
        moments.append(Moment(device))
    short, long = (later.seconds_since(earlier) for earlier, later in pairwise(moments))
    assert 5 * short < long < 20 * short
