"""A disk that takes no more from some moment on, for a process of a test: no root, and no disk, is needed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def fill_disk(folder: Path, after_lines: int, number: int = errno.ENOSPC) -> None:
    """From when metrics.jsonl in `folder` has so many lines, nothing in it can be written any more by this process."""
    inside, metrics, num_lines = f"{folder}{os.sep}", str(folder / "metrics.jsonl"), 0

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        nonlocal num_lines
        if event not in ("open", "os.mkdir", "os.rename") or isinstance(args[0], int):
            return
        path = os.fsdecode(args[0])
        if (path + os.sep).startswith(inside) and (event != "open" or args[2] & WRITES):
            if num_lines >= after_lines:
                raise OSError(number, os.strerror(number), path)
            num_lines += path == metrics

    sys.addaudithook(refuse)  # which can't be taken away again, but from a forked process nobody wants that
