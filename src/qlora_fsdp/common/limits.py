"""A limit of memory for what this process does itself with foreign files: rows that are unpacked.

What can run in another process has its limits there (contained.py). Imports no torch.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

STATM = Path("/proc/self/statm")
SPARE_BYTES = 2**26  # which Python can't take in LOOK_SECONDS, small object by small object
LOOK_SECONDS = 0.02  # of this process's time on its processors, between two looks at its memory
AGAIN_SECONDS = 0.5
MEASURE_SECONDS = 1.0  # how long a measured use of memory is taken for the present one: measuring costs 0.2 ms


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Lets what runs inside take at most `num_bytes` more; beyond that it raises MemoryError.

    The limit is the whole process's, so it is for short work, and generous enough for what other threads do meanwhile.
    Where several threads limit memory at the same time, the widest limit counts.

    The system refuses what is beyond the limit. That ends a single large object well. But where many small ones have
    taken all, Python lacks the memory to raise an error, and can look for its handler forever (CPython 3.11 did). So in
    the main thread the system's limit is a little higher, and a timer compares what is used with the limit itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    limit = _used_bytes() + num_bytes
    hard = limit + SPARE_BYTES * is_main
    with _lock:
        if not _limits:
            _before.append(resource.getrlimit(resource.RLIMIT_DATA))
        _limits.append(hard)
        _apply()
    try:
        with _looking_at_memory(limit) if is_main else nullcontext():
            yield
    finally:
        with _lock:
            _limits.remove(hard)
            _apply()


@contextmanager
def _looking_at_memory(limit: int) -> Iterator[None]:
    is_over = False

    def look(number: int, frame: FrameType | None) -> None:
        if not is_over and _measure_bytes() > limit:
            # Again after a while: a finalizer may have swallowed this one.
            signal.setitimer(signal.ITIMER_PROF, AGAIN_SECONDS, LOOK_SECONDS)
            raise MemoryError

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, LOOK_SECONDS, LOOK_SECONDS)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


_lock = threading.Lock()
_limits: list[int] = []  # of those who limit memory now
_before: list[tuple[int, int]] = []  # the process's soft and hard limit without these


def _apply() -> None:
    """Sets the process's limit, which is the one of before once nobody limits memory any more."""
    soft, hard = _before[0] if _limits else _before.pop()
    finite = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([*finite, max(_limits)]) if _limits else soft, hard))


_measured = (-MEASURE_SECONDS, 0)  # when, and how many bytes


def _used_bytes() -> int:
    global _measured
    if time.monotonic() - _measured[0] > MEASURE_SECONDS:
        _measured = (time.monotonic(), _measure_bytes())
    return _measured[1]


def _measure_bytes() -> int:
    """Bytes that the limit counts: private memory that can be written."""
    return int(STATM.read_text().split()[5]) * resource.getpagesize()
