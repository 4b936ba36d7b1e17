"""A place in a data set, up to which it has been read. It can be saved, and reading can continue from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Position:
    """How far a data set has been read. Readers move it as they go.

    Reading can begin anywhere in JSONL, by bytes, and in Parquet and Arrow files, by rows. Compressed files, CSV and
    JSON lists are read from their beginning again, up to the position.

    Attributes:
        file: the number of the file among those of the data set.
        start: where in the file reading can begin again: bytes of JSONL, rows of Parquet and Arrow; else 0.
        number: lines, or rows, before `start`; of a hub data set rows before the position.
        num_taken: rows read from `start` on.
        hub: for a hub data set, what `datasets` calls the state of its iteration; None for files, and at the beginning.
    """

    file: int = 0
    start: int = 0
    number: int = 0
    num_taken: int = 0
    hub: dict[str, Any] | None = None

    def move(self, start: int, number: int) -> None:
        """Says that reading can begin again at `start`, where `number` lines or rows are before it."""
        self.start = start
        self.number = number
        self.num_taken = 0

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """The position that a file holds.

        Raises:
            ValueError, TypeError: it is none.
        """
        position = cls(**value)
        numbers = (position.file, position.start, position.number, position.num_taken)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{numbers} are no position")
        if not (position.hub is None or isinstance(position.hub, dict)):
            raise TypeError("the state of a hub data set is no object")
        return position
