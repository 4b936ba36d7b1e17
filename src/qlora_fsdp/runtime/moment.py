"""Points in time between which a GPU's work is timed, without a host that waits for it."""

from __future__ import annotations

import time

import torch


class Moment:
    """The time at which the device is done with all that is queued now.

    Queued work is done later than it is queued, by up to a step where the host runs ahead. So a GPU notes the time
    itself, by a CUDA event in the current stream. On a CPU, which queues nothing, it is the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between an earlier moment of the same device and this one. A host that is ahead of it waits."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        self._event.synchronize()
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000
