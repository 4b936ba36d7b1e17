"""Make a command start faster, and end cleanly on Ctrl-C while libraries are imported."""

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
SECONDS_BETWEEN_BARS = "30"  # in a log file, where every state of a progress bar stays


@contextmanager
def quick_imports() -> Iterator[None]:
    """Wraps the import of torch and of what is built on it, which then takes a quarter less time.

    The garbage collector is off meanwhile: it would look again and again through objects that stay. Nor does torch
    import its compiler, for which bitsandbytes asks by putting torch.compile around fallbacks that nothing here calls.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", SECONDS_BETWEEN_BARS)
    # It warns that a kernel for 4-bit inference on CPUs is missing, which nothing here calls either.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # Without a library for the GPU it prints a traceback; `fallbacks.py` and doctor say the same in one line.
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
    """Lets SIGINT end this process with one line and the exit code of a shell, until another handler is set.

    Without it, Ctrl-C during the imports that a command begins with would print their tracebacks.
    """
    signal.signal(signal.SIGINT, partial(_end, os.getpid(), f"Interrupted by SIGINT. {detail}".strip()))


def end_with_the_reader() -> None:
    """Let a command that only prints end silently once nobody reads on, as in `... | head`.

    Python would end with a traceback of BrokenPipeError. Not for commands that write files or talk to other processes.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _end(main_pid: int, text: str, number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0" and os.getpid() == main_pid:  # worker processes say nothing
        with suppress(OSError, RuntimeError):  # the signal may come while stdout is being written
            sys.stdout.flush()
        os.write(2, f"\nError: {text}\n".encode())
    os._exit(128 + number)
