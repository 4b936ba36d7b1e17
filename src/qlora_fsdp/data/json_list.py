"""The rows of a file that is one JSON list. Its text is in memory as a whole, its rows are parsed one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO

_SPACE = re.compile(r"[ \t\n\r]*")


class NotAList(ValueError):
    """A file is no JSON list, or a damaged one. The message says where, as `json` does."""


def read_list(stream: IO[bytes]) -> Iterator[bytes]:
    """The items of a JSON list, as they are written in the file.

    Args:
        stream: begins with the list, maybe after a byte order mark.

    Raises:
        NotAList: the file is damaged, no UTF-8, or nested too deeply.
    """
    content = stream.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotAList(f"byte {error.start + 1} of the file is 0x{error.object[error.start]:02x}, not UTF-8") from error
    del content
    try:
        yield from _items(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotAList(str(error)) from error


def _items(text: str) -> Iterator[bytes]:
    scan, position = json.JSONDecoder().raw_decode, _skip_space(text, 0)
    if not text.startswith("[", position):
        raise json.JSONDecodeError("Expecting value", text, position)
    position = _skip_space(text, position + 1)
    has_more = not text.startswith("]", position)
    while has_more:
        _, end = scan(text, position)  # which tells where the value ends
        yield text[position:end].encode()
        position = _skip_space(text, end)
        has_more = text.startswith(",", position)
        if has_more:
            position = _skip_space(text, position + 1)
    if not text.startswith("]", position):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
    position = _skip_space(text, position + 1)
    if position < len(text):
        raise json.JSONDecodeError("Extra data", text, position)


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None  # it may be empty
    return found.end()
