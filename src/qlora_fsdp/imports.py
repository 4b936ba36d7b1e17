"""Importing the libraries: most of the time between a command and its first line."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
