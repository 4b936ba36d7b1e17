"""Read a data set over and over, from any position, so that its rows never end."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.files.row_files import RawRow
from qlora_fsdp.data.read import Source, iterate_rows

ROWS_A_READER = 100_000  # of a file that can be sought, after which the next rank reads on


class EndlessRows:
    """A data set that is being read.

    Attributes:
        num_rows: how many rows it has, once they have been read from the first to the last; until then None.
        num_ends: how often the last `take` came to its end.
    """

    def __init__(self, source: Source, position: Position) -> None:
        self.source = source
        self.num_rows: int | None = None
        self.num_ends = 0
        self._begin(position)

    def take(self, num_rows: int) -> list[RawRow]:
        """The next rows.

        Raises:
            DataError: the data set can't be read, or has no rows.
        """
        rows: list[RawRow] = []
        self.num_ends = 0
        while True:
            found = list(islice(self._rows, num_rows - len(rows)))
            rows += found
            self._num_read += len(found)
            if len(rows) == num_rows:
                return rows
            if self._is_from_start:
                self.num_rows = self._num_read
                if self.num_rows == 0:
                    raise DataError(f"{self.source.path} has no rows. Set data.path or data.mix.")
            self.num_ends += 1
            self._begin(Position())

    def _begin(self, position: Position) -> None:
        self.position = replace(position)
        self._is_from_start = position == Position()
        self._num_read = 0
        self._rows = iterate_rows(self.source, self.position)


def find_reader_rank(source: int, position: Position, num_ranks: int) -> int:
    """The rank that reads data set number `source` from a position on, and hands its rows to the others.

    Files are spread over the ranks, and long ones that can be sought piece by piece. What can't be sought stays with
    one rank, because another would have to read it from its beginning.
    """
    piece = 0 if position.hub is not None else position.file + position.number // ROWS_A_READER
    return (source + piece) % num_ranks
