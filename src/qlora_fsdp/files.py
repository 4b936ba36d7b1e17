"""Files that a reader never sees half written. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader never sees half a file."""
    write_atomically(path, json.dumps(value, indent=2, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write text under a temporary name in the same folder, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
