"""Ctrl-C while a command starts, which is for the most part imports: they would answer with tracebacks of their own."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType


def end_at_once(detail: str = "") -> None:
    """Until another handler takes its place, SIGINT ends this process with a line and the shell's exit code for it."""
    signal.signal(signal.SIGINT, partial(_end, os.getpid(), f"Interrupted by SIGINT. {detail}".strip()))


def _end(main_pid: int, text: str, number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0" and os.getpid() == main_pid:  # worker processes have nothing to say
        with suppress(OSError, RuntimeError):  # it may be in the middle of a line
            sys.stdout.flush()
        os.write(2, f"\nError: {text}\n".encode())
    os._exit(128 + number)
