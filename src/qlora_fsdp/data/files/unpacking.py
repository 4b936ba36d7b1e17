"""Limit how much a compressed file of rows may unpack to.

A file of 1 KB can unpack to terabytes, in one row or in many, and nothing in it has to say so beforehand. So bytes are
counted while they are unpacked, against the bytes of the file that have been read. Formats that decompress whole pages
by themselves (Parquet, Arrow) get that much memory for each batch of rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import IO, Any

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.limits import limited_memory
from qlora_fsdp.common.text import show_bytes
from qlora_fsdp.data.files.row_file import RowFile

MAX_RATIO = 200  # times its size that a file may unpack to
FREE_BYTES = 2**27  # that any file may unpack to; parsed, these can take twenty times as much memory
BATCH_BYTES = 2**30  # of memory for a batch of rows, beside what the file may unpack to
BUFFER_BYTES = 2**17


class Unpacking:
    """Counts what a file of rows unpacks to.

    Args:
        file: told in the message.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self._limit = FREE_BYTES
        self._num_packed: Callable[[], int] = lambda: 0  # bytes of the file that have been read

    def open(self, packed: IO[bytes], decompress: Callable[[IO[bytes]], IO[bytes]] | None) -> IO[bytes]:
        """A stream of what `packed` unpacks to. Reading it raises DataError once it is too much."""
        self._num_packed = packed.tell
        return packed if decompress is None else io.BufferedReader(_Counted(decompress(packed), self), BUFFER_BYTES)

    def watch(self, packed: IO[bytes]) -> None:
        """Learns the size of a file that a library unpacks, from the stream, which is at its beginning then."""
        size = packed.seek(0, io.SEEK_END)
        packed.seek(0)
        self._num_packed = lambda: size

    def count(self, rows: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Counts rows with their places, as they are cached. In one byte of a file there may be a row of many columns.

        Raises:
            DataError: they are too much for so small a file.
        """
        num_bytes = 0
        for place, row in rows:
            num_bytes += len(place) + len(row)
            self.check(num_bytes)
            yield place, row

    def check(self, num_bytes: int) -> None:
        """Checks how many bytes have been unpacked so far.

        Raises:
            DataError: they are too many for so small a file.
        """
        if num_bytes > self._limit and num_bytes > self._find_limit():
            raise self._too_much()

    def take(self, batches: Iterator[Any], convert: Callable[[Any], list[bytes]]) -> list[bytes] | None:
        """The rows of the next batch, unpacked and converted in limited memory; None: there is none.

        Raises:
            DataError: they take more.
        """
        try:
            with limited_memory(BATCH_BYTES + self._find_limit()):
                batch = next(batches, None)
                return None if batch is None else convert(batch)
        except MemoryError:
            raise self._too_much() from None

    def _find_limit(self) -> int:
        self._limit = max(FREE_BYTES, MAX_RATIO * self._num_packed())
        return self._limit

    def _too_much(self) -> DataError:
        return DataError(
            f"{self.file} unpacks to more than {show_bytes(self._limit)}, more than {MAX_RATIO} times its size: "
            "such files are made to fill memory and disks. If you trust it, unpack it yourself."
        )


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted as they are read."""

    def __init__(self, stream: IO[bytes], unpacking: Unpacking) -> None:
        self.stream = stream
        self.unpacking = unpacking
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        buffer[: len(content)] = content
        self.num_bytes += len(content)
        self.unpacking.check(self.num_bytes)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()
