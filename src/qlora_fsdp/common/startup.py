"""The seconds between a command and its first line: most of them go into importing libraries."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

NO_COMPILER = "TORCHDYNAMO_DISABLE"
SECONDS_BETWEEN_BARS = "30"  # in a file, where each state of a progress bar stays, and not ten a second


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around the import of torch and what is built on it: a quarter less time.

    What modules make stays: the garbage collector would look through it again and again. And bitsandbytes puts
    torch.compile around fallbacks that nothing here calls, for which torch would import its compiler.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", SECONDS_BETWEEN_BARS)
    # It misses a kernel for 4-bit inference on CPUs, which nothing here calls either.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # It prints a traceback where it has no library for the GPU; `fallbacks.py` and doctor say so in a line.
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)
    is_ours = NO_COMPILER not in os.environ
    os.environ.setdefault(NO_COMPILER, "1")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if is_ours:
            os.environ.pop(NO_COMPILER, None)


def end_at_once(detail: str = "") -> None:
    """Until another handler takes its place, SIGINT ends this process with a line and the shell's exit code for it.

    The imports that a command begins with would answer Ctrl-C with tracebacks of their own.
    """
    signal.signal(signal.SIGINT, partial(_end, os.getpid(), f"Interrupted by SIGINT. {detail}".strip()))


def _end(main_pid: int, text: str, number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0" and os.getpid() == main_pid:  # worker processes have nothing to say
        with suppress(OSError, RuntimeError):  # it may be in the middle of a line
            sys.stdout.flush()
        os.write(2, f"\nError: {text}\n".encode())
    os._exit(128 + number)
