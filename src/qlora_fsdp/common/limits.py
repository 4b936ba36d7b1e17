"""Limits of time and memory for code that anybody may have written: regular expressions and chat templates.

What such code costs can't be told from its text. Imports no torch.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STATM = Path("/proc/self/statm")
MEASURE_SECONDS = 1.0  # how long a measured use of memory is taken for the present one: measuring costs 0.2 ms


@contextmanager
def limited_time(seconds: float, error: Exception) -> Iterator[None]:
    """Ends what runs inside by raising `error` after so many seconds of this process's time on its processors.

    Python looks for signals between its own instructions and while it matches a regular expression, so a timer can end
    it there. Signals reach only the main thread, and commands run their work there; in another there is no limit.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise error

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, end) if is_main else None
    if is_main:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Gives what runs inside so many more bytes of memory at most; beyond, Python raises MemoryError.

    The limit is the whole process's, so it is for short work, and generous enough for what other threads do meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([*limits, _used_bytes() + num_bytes]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


_measured = (-MEASURE_SECONDS, 0)  # when, and how many bytes


def _used_bytes() -> int:
    """Bytes that the limit counts: private memory that can be written."""
    global _measured
    if time.monotonic() - _measured[0] > MEASURE_SECONDS:
        _measured = (time.monotonic(), int(STATM.read_text().split()[5]) * resource.getpagesize())
    return _measured[1]
