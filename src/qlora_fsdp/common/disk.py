"""Explain why a disk can't be written to, and find another folder with room. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from qlora_fsdp.common.text import first_line


def is_write_error(error: BaseException) -> bool:
    """Whether an error says that a file can't be written. Libraries in Rust have classes of their own, or none."""
    return isinstance(error, (OSError, SafetensorError)) or _system_error(error) is not None


def disk_reason(error: BaseException) -> str:
    """Why a file can't be written, in the system's words, such as `No space left on device`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _system_error(error)
    if number is not None:
        return os.strerror(number)
    return first_line(error).rstrip(".")


def find_room(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Makes new folders in place of one that can't be written, one after another: beside it, then on other disks.

    Those that the caller leaves empty are removed.

    Args:
        folder: the one that can't be written.
        num_bytes: places with less room are left out.
    """
    temporary = (os.environ.get("TMPDIR", "/tmp"), "/var/tmp")  # noqa: S108  # in a new folder of this user's alone
    places = (str(folder.parent), *temporary, os.environ.get("HOME", "."), ".")
    for place in dict.fromkeys(places):
        with suppress(OSError):
            if shutil.disk_usage(place).free < num_bytes:
                continue
            made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-rescued-", dir=place)).absolute()
            try:
                yield made
            finally:
                with suppress(OSError):
                    made.rmdir()  # which fails unless it is empty


def write_elsewhere(folder: Path, num_bytes: int, write: Callable[[Path], None]) -> Path | None:
    """Lets `write` fill a new folder in place of one that can't be written.

    Args:
        folder: the one that can't be written.
        num_bytes: what `write` takes, about.
        write: called with one folder after another until it succeeds.

    Returns:
        The folder that was written; None if there is none with room.
    """
    for place in find_room(folder, num_bytes):
        try:
            write(place)
        except Exception as error:
            _empty(place)
            if not is_write_error(error):
                raise
        else:
            return place
    return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _system_error(error: BaseException) -> int | None:
    """The system's number of an error, also where a library in Rust has put it into the text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is not None:
        return int(found[1])
    return error.errno if isinstance(error, OSError) else None
