"""Files that a reader never sees half written, and their digests. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader never sees half a file."""
    write_atomically(path, json.dumps(value, indent=2, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write text under a temporary name in the same folder, then rename."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The temporary name, in the same folder, of a file that takes the path's place once it is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # half a file, of a full disk


def digest_file(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()
