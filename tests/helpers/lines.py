"""Files of JSON lines, such as metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; none as long as it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
