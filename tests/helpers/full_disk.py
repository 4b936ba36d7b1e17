"""Disks that take no more: one that is small, and one that is full from some moment on for a process of a test."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def fill_disk(folder: Path, after_lines: int, number: int = errno.ENOSPC) -> None:
    """From when metrics.jsonl in `folder` has so many lines, nothing in it can be written any more by this process.

    That takes neither root nor a disk.
    """
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


def fill_after_two_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From the third file of weights on, a merge finds the disk full. Returns the names of those written before."""
    from qlora_fsdp.inference import merge_files  # with torch, which the others do without

    save = merge_files._save
    saved: list[str] = []

    def save_two(tensors: dict[str, Any], target: Path) -> None:
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved.append(target.name)
        save(tensors, target)

    monkeypatch.setattr(merge_files, "_save", save_two)
    return saved


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in a new folder, of a size such as `512k`; the test is skipped where that takes root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a run of a failed test may still be in it
