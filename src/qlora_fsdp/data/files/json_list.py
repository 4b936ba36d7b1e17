"""A JSON list as a stream: its items, one after another, without holding the list in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

BLOCK_BYTES = 2**20
# An error so close to the end of what has been read may be one of an item that goes on after it.
LONGEST_PIECE = 16
CLOSING = '}]"'
SPACE = " \t\n\r"
UNFINISHED = "Unterminated string"  # of json's errors the only one whose position is not where the text ends


class NotAList(ValueError):
    """A file is no JSON list, or a damaged one. The message says where, as `json` does."""


def read_list(stream: IO[bytes]) -> Iterator[bytes]:
    """The items of a JSON list, as they are written in the file.

    Args:
        stream: begins with the list, maybe after a byte order mark.

    Raises:
        NotAList: the file is damaged, no UTF-8, or nested too deeply.
    """
    text = _Text(stream)
    text.take("[")
    if text.peek() == "]":
        text.take("]")
    else:
        yield text.take_value()
        while text.peek() == ",":
            text.take(",")
            yield text.take_value()
        text.take("]", expected="Expecting ',' delimiter")
    if text.peek():
        raise text.error("Extra data")


@dataclass
class _Text:
    """The text of a stream, of which a part is in memory.

    Attributes:
        stream: where more text comes from.
        buffer: text that has been read.
        position: how much of it has been taken.
        num_dropped: characters before the buffer; `num_lines` and `last_line` are the line breaks among them, and the
            characters after the last of these.
        num_bytes: how many bytes have been read.
        at_end: whether the stream has been read to its end.
    """

    stream: IO[bytes]
    buffer: str = ""
    position: int = 0
    num_dropped: int = 0
    num_lines: int = 0
    last_line: int = 0
    num_bytes: int = 0
    at_end: bool = False

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self.position < len(self.buffer):
                if self.buffer[self.position] not in SPACE:
                    return self.buffer[self.position]
                self.position += 1
            if self.at_end:
                return ""
            self._read(BLOCK_BYTES)

    def take(self, character: str, expected: str = "Expecting value") -> None:
        """Passes over a character that has to come next."""
        if self.peek() != character:
            raise self.error(expected)
        self.position += 1

    def take_value(self) -> bytes:
        """The next value, which is parsed to find its end."""
        self.peek()
        while True:
            try:
                _, end = self._scan(self.buffer, self.position)
                # A number close to the end of the buffer may go on after it.
                is_whole = self.buffer[end - 1] in CLOSING or end + LONGEST_PIECE < len(self.buffer)
                if is_whole or self.at_end:
                    value = self.buffer[self.position : end].encode()
                    self.position = end
                    return value
            except json.JSONDecodeError as error:
                may_go_on = error.msg.startswith(UNFINISHED) or error.pos + LONGEST_PIECE >= len(self.buffer)
                if self.at_end or not may_go_on:
                    raise self.error(error.msg, error.pos) from error
            except RecursionError as error:
                raise NotAList(str(error)) from error
            self._read(max(BLOCK_BYTES, len(self.buffer)))  # twice as much, so that long values take linear time

    def error(self, message: str, position: int | None = None) -> NotAList:
        """The error at a position in the buffer, with its line, column and character in the file."""
        position = self.position if position is None else position
        lines = self.buffer.count("\n", 0, position)
        column = position - self.buffer.rfind("\n", 0, position) if lines else self.last_line + position + 1
        place = f"line {self.num_lines + lines + 1} column {column} (char {self.num_dropped + position})"
        return NotAList(f"{message}: {place}")

    def _read(self, num_bytes: int) -> None:
        """Reads more, and drops what has been taken."""
        taken = self.buffer[: self.position]
        lines = taken.count("\n")
        self.num_lines += lines
        self.last_line = len(taken) - taken.rfind("\n") - 1 if lines else self.last_line + len(taken)
        self.num_dropped += len(taken)
        data = self.stream.read(num_bytes)
        self.num_bytes += len(data)
        self.at_end = not data
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = self.num_bytes - len(error.object) + error.start
            raise NotAList(f"byte {place + 1} of the file is 0x{error.object[error.start]:02x}, not UTF-8") from error
        self.buffer = self.buffer[self.position :] + text
        self.position = 0
