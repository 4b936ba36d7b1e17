"""Files that a reader never sees half written, and their digests. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader never sees half a file; what JSON does not know becomes text."""
    write_atomically(path, json.dumps(value, indent=2, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Writes text so that a reader never sees half a file."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name in the same folder. What the caller writes there takes the path's place at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file, if the disk is full


def digest_file(file: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return digest_stream(stream)


def digest_stream(stream: BinaryIO) -> str:
    """Returns the SHA-256 of the bytes that follow in a file."""
    digest = hashlib.sha256()
    while block := stream.read(2**22):
        digest.update(block)
    return digest.hexdigest()
