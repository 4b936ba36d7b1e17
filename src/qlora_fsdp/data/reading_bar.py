"""Progress bars for work on rows, with the time that is left. Work of less than a second shows none."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import IO, Any

from tqdm import tqdm

from qlora_fsdp.data.read import Source


def row_bar(title: str, total: int | None, done: int = 0) -> Any:
    """A bar of rows, whose total may not be known (None)."""
    return tqdm(total=total, initial=done, desc=title, unit=" rows", unit_scale=True, delay=1, leave=False)


class ReadingBar:
    """A bar of how much of a source has been read: of the bytes of its files as they are stored, or else of its rows.

    Attributes:
        source: to be read in place of the other: the bar sees how far its files are read.
    """

    def __init__(self, source: Source, title: str) -> None:
        sizes = [file.num_bytes for file in source.files]
        self._ends = list(accumulate(size or 0 for size in sizes))
        self._file = 0
        self._stream: IO[bytes] | None = None
        files = tuple(replace(file, watch=partial(self._open, number)) for number, file in enumerate(source.files))
        self.source = replace(source, files=files)
        if files:
            total = None if None in sizes else self._ends[-1]
            self._bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, leave=False)
        else:
            self._bar = row_bar(title, len(source.hub) if isinstance(source.hub, Sized) else None)

    def __enter__(self) -> ReadingBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def advance(self, num_rows: int) -> None:
        """Moves the bar by `num_rows` more rows."""
        self._bar.update(num_rows if not self._ends else max(0, self._position() - self._bar.n))

    def _open(self, file: int, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream

    def _position(self) -> int:
        before = self._ends[self._file - 1] if self._file else 0
        if self._stream is None or self._stream.closed:
            return self._ends[self._file]
        return min(before + self._stream.tell(), self._ends[self._file])
