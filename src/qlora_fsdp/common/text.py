"""Tables and numbers as text. Imports no torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeGuard

MAX_LISTED = 8  # items of a list in a message
MAX_SHOWN = 400  # characters of each


def format_table(rows: Sequence[dict[str, str]]) -> str:
    """Returns rows as aligned columns under their names. A column that is empty in every row is left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns: list[list[str]] = []
    for name in names:
        cells = [row.get(name, "") for row in rows]
        if any(cells):
            width = max(map(len, [name, *cells]))
            columns.append([cell.ljust(width) for cell in [name, *cells]])
    lines = ["  ".join(line) for line in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns text of others without the control characters that a terminal obeys: each becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def without_directions(text: str) -> str:
    """Returns text in which each character that changes the direction of what follows is named, as U+202E is by 202e.

    Text of others could be read as another one with them (https://trojansource.codes). Arabic and Hebrew need none.
    """
    return _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_lines(text: str) -> str:
    """Returns text of several lines without control characters. Its line breaks stay, and tabs become spaces."""
    return "\n".join(printable(line) for line in text.expandtabs().split("\n"))


def for_stdout(text: str) -> str:
    """Returns text of others as it may be written to stdout: as it is, unless that is a terminal."""
    return printable_lines(text) if sys.stdout.isatty() else text


def is_unicode(text: str) -> bool:
    """Whether text, or a name of a file, was whole UTF-8; Python stands half characters in for other bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def shorten(text: str, length: int = 80) -> str:
    """Returns text of others for a message: cut, and without control characters."""
    text = printable(text[: length + 1])
    return text if len(text) <= length else f"{text[:length]}..."


def list_some(items: Sequence[str]) -> str:
    """Returns texts of others for a message, a line each; the tail of a long list is given as a count."""
    lines = [f"  - {shorten(item, MAX_SHOWN)}" for item in items[:MAX_LISTED]]
    if len(items) > MAX_LISTED:
        lines.append(f"  - and {len(items) - MAX_LISTED} more")
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or the name of its class if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def name_error(error: BaseException) -> str:
    """Returns the class of an error and the first line of what it says, such as `ValueError: no such file`."""
    text = first_line(error)
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of others is a number, which True and False are to Python alone."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value of others is a whole number, which True and False are to Python alone."""
    return isinstance(value, int) and not isinstance(value, bool)


def finite_or_none(number: float) -> float | None:
    """Returns the number; None if it is NaN or infinite, which JSON does not have."""
    return number if math.isfinite(number) else None


def show_number(value: float | None, spec: str) -> str:
    """Returns a number in a format of Python's, and an empty text for None."""
    return "" if value is None else format(value, spec)


def show_duration(seconds: float | None) -> str:
    """Returns a duration such as `0:03:20`, an empty text for None, and `?` for what is longer than any, or none."""
    if seconds is None:
        return ""
    is_duration = is_number(seconds) and abs(seconds) <= timedelta.max.total_seconds() / 2
    return str(timedelta(seconds=round(seconds))) if is_duration else "?"


def plural(number: int, what: str) -> str:
    """Returns a number of things, such as `1 row` or `2,000 rows`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def join_words(words: Sequence[str]) -> str:
    """Returns `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def show_size(number: int) -> str:
    """Returns a number of parameters, such as `70.55 B` or `3.48 M`."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def show_bytes(number: int) -> str:
    """Returns a number of bytes, such as `1.50 GiB` or `36.0 MiB`."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many items two texts or lists have in common at their beginnings.

    It compares halves, which Python does in C.
    """
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
