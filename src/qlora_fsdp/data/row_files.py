"""Files of rows: how each kind is read, one raw row after another, also from inside a compressed file.

A raw row is the bytes of a JSON object, not yet parsed, with its place (file and line). A broken line can't stop the
reading, rows may differ in their keys, and parsing runs in parallel with tokenizing. Lines are read one at a time, so
memory stays bounded, except for a JSON list, which is parsed as a whole.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from qlora_fsdp.common.errors import DataError

RawRow = tuple[str, bytes]  # place, JSON

TEXT_SUFFIXES = (".txt", ".md")
BATCH_ROWS = 1000  # of Parquet files
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, csv.Error)  # of files that can't be read


def find_reader(file: Path) -> Callable[[Path], Iterator[RawRow]] | None:
    """The function that reads the rows of a file, by its name; None: it is no file of rows."""
    if file.suffix in COMPRESSIONS:
        inside = Path(file.stem).suffix
        return READERS[inside] if inside in COMPRESSIBLE else None
    return READERS.get(file.suffix)


def known_suffixes() -> str:
    """The names of files that are read, for messages."""
    packed = f"{', '.join(COMPRESSIBLE)} also as {', '.join(COMPRESSIONS)}"
    return f"{', '.join((*READERS, *TEXT_SUFFIXES))} ({packed})"


def read_text(file: Path) -> Iterator[RawRow]:
    """The one row of a file of plain text."""
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    yield file.name, dump_row({"text": text})


def dump_row(row: Any) -> bytes:
    """A row that has been parsed already, as a raw row."""
    try:
        # surrogateescape gives back the bytes that were not UTF-8, for the check to find.
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # half of a character is written as its escape, for the check as well
        return json.dumps(row, default=_as_text).encode("ascii")


def _as_text(value: Any) -> str:
    """What JSON does not have: text of Parquet that is not marked as such; dates and the like."""
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _open(file: Path) -> IO[bytes]:
    """The contents of a file, decompressed as they are read."""
    opened: IO[bytes] = COMPRESSIONS.get(file.suffix, open)(file, "rb")
    return opened


def _open_zstd(file: Path, mode: str) -> IO[bytes]:
    stream: Any = pa.input_stream(str(file), compression="zstd")
    return io.BufferedReader(stream)


def _read_jsonl(file: Path) -> Iterator[RawRow]:
    with _open(file) as lines:
        last = 0  # the last line that is a row
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            # Blank lines are rows, and bad ones, only if another row follows.
            yield from ((f"{file.name}:{blank}", b"") for blank in range(last + 1, number))
            last = number
            yield f"{file.name}:{number}", line.rstrip(b"\r\n")


def _read_json(file: Path) -> Iterator[RawRow]:
    with _open(file) as stream:
        is_list = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if not is_list:  # one row per line, under the name .json
        yield from _read_jsonl(file)
        return
    with _open(file) as stream:
        contents = stream.read()
    try:
        rows = json.loads(contents.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} can't be read as a JSON list: {error}. Repair it, or write a row a line.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file.name} row {number}", dump_row(row)


def _read_csv(file: Path) -> Iterator[RawRow]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        read: list[str] = []  # the lines of a row
        lines = csv.reader(_keep(stream, read))
        header, last = next(lines, []), _take(read)
        twice = [name for name in header if name and header.count(name) > 1]
        if twice:
            raise DataError(f"{file} has two columns {twice[0]}. Rename one, so that it is clear which is meant.")
        first_line = lines.line_num + 1  # a quoted cell may hold line breaks
        blank: list[str] = []  # places of blank lines, which are rows only if another row follows
        for cells in lines:
            place = f"{file.name}:{first_line}"
            first_line, last = lines.line_num + 1, _take(read)
            if not cells:
                blank.append(place)
                continue
            yield from ((blank_place, b"") for blank_place in blank)
            blank.clear()
            # A row of another length is kept as a list, which the check refuses.
            yield place, dump_row(dict(zip(header, cells, strict=True)) if len(cells) == len(header) else cells)
        # An open quote takes in all that follows it, so it can only be in the last row.
        if last and len(list(csv.reader([*last, '"\n']))) == 1:
            line = first_line - len(last)
            raise csv.Error(f"a quote in the row of line {line} is not closed, and takes in all lines after it")


def _keep(lines: Iterable[str], kept: list[str]) -> Iterator[str]:
    for line in lines:
        kept.append(line)
        yield line


def _take(kept: list[str]) -> list[str]:
    taken = kept.copy()
    kept.clear()
    return taken


def _read_parquet(file: Path) -> Iterator[RawRow]:
    number = 0
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{file.name} row {number}", dump_row(row)


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
COMPRESSIBLE = (".jsonl", ".json", ".csv")  # Parquet files are compressed inside
COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    **({".zst": _open_zstd} if pa.Codec.is_available("zstd") else {}),
}
