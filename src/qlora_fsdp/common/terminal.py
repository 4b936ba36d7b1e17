"""What a terminal can show. Imports no torch."""

from __future__ import annotations

import os
import shutil
import textwrap
from contextlib import suppress
from typing import TextIO

COLORS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
CLEAR_LINE = "\r\033[K"
_ITEM = "  - "  # how an item of a list begins


def say(text: str) -> None:
    """Prints text, if anybody takes it: a pipe that is closed or a disk that is full ends nobody's work."""
    with suppress(OSError):
        print(text, flush=True)


def wrap_words(text: str, stream: TextIO) -> str:
    """Returns text whose sentences are broken between words where a terminal would break them within one.

    Lines that are indented or have columns stay as they are: commands are copied, and tables are read downwards. Items
    of a list are sentences.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        start = _ITEM if line.startswith(_ITEM) else ""
        words = line.removeprefix(start)
        if len(line) <= width or words.startswith(" ") or "  " in words:
            lines.append(line)
            continue
        behind = " " * len(start)
        lines += textwrap.wrap(
            words, width, initial_indent=start, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def can_redraw(stream: TextIO) -> bool:
    """Whether a line on it can be written over: it is a terminal, and not one that knows no escape sequences."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "")


def uses_color(stream: TextIO) -> bool:
    """Whether text on it is coloured: it is such a terminal, and its user has not set NO_COLOR (no-color.org)."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def colored(text: str, color: str) -> str:
    """Returns text in one of COLORS, whatever it is shown on."""
    return f"\033[{COLORS[color]}m{text}\033[0m"
