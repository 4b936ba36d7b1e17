"""Ctrl-C while a command starts, which is for the most part imports: they would answer with tracebacks of their own."""

from __future__ import annotations

import os
import signal
from functools import partial
from types import FrameType


def end_at_once() -> None:
    """Until another handler takes its place, SIGINT ends this process with a line and the shell's exit code for it."""
    signal.signal(signal.SIGINT, partial(_end, os.getpid()))


def _end(main_pid: int, number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0" and os.getpid() == main_pid:  # worker processes have nothing to say
        os.write(2, b"\nError: Interrupted by SIGINT: no run was going on.\n")
    os._exit(128 + number)
