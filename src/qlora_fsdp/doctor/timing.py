"""Measures how long something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

REPEATS = 3


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Seconds per call: the mean of REPEATS calls, after one call to warm up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    function()
    wait()
    started = time.perf_counter()
    for _ in range(REPEATS):
        function()
    wait()
    return (time.perf_counter() - started) / REPEATS
