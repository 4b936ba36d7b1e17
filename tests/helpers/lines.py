"""Files of JSON lines, such as metrics.jsonl, and a pipe that takes none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; none as long as it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_lines(file: Path, rows: Iterable[Any]) -> Path:
    """Makes a file of objects, one a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def broken_pipe() -> TextIOWrapper:
    """A pipe whose reader has gone, as in `... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")
