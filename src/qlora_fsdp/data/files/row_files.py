"""Files of rows: how each kind is read, one raw row after another, also from inside a compressed file.

A raw row is the bytes of a JSON object, not yet parsed, with its place (file and line). A broken line can't stop the
reading, rows may differ in their keys, and parsing runs in parallel with tokenizing. Rows are read one at a time, or in
batches, so memory stays bounded. Of files that store columns, only those columns are read that rows need.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import accumulate
from pathlib import PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.columns import COMMON_NAMES, NOT_TEXT
from qlora_fsdp.data.files.json_list import NotAList, read_list
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.files.row_file import RowFile
from qlora_fsdp.data.files.unpacking import Unpacking

RawRow = tuple[str, bytes]  # place, JSON
ChooseColumns = Callable[[Sequence[str]], list[str]]  # of the columns that a file has, those to read
# Reads from a position on, and tells the position at which reading can begin again as it goes.
Reader = Callable[[RowFile, ChooseColumns, Unpacking, Position], Iterator[RawRow]]

TEXT_SUFFIXES = (".txt", ".md")
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
BEGINNING = 2**20  # bytes of a JSON file that tell what it is
# Keys of one row, which alone in its file is no object that holds rows.
ROW_KEYS = (*COMMON_NAMES["messages"], "contents", "prompt", "chosen")
BATCH_ROWS = 1000  # of Parquet and Arrow files, and of what is copied before it is tokenized
# Of files that can't be read. ValueError and OverflowError: pyarrow has values that Python has not (the year 20,000).
BROKEN = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, csv.Error),
    *(pa.ArrowException, ValueError, OverflowError, RecursionError),
)


def find_reader(file: RowFile) -> Reader | None:
    """The function that reads the rows of a file, by its name; None: it is no file of rows."""
    if file.suffix in COMPRESSIONS:
        inside = PurePosixPath(file.stem).suffix
        return READERS[inside] if inside in COMPRESSIBLE else None
    return READERS.get(file.suffix)


def known_suffixes() -> str:
    """The names of files that are read, for messages."""
    packed = f"{', '.join(COMPRESSIBLE)} also as {', '.join(COMPRESSIONS)}"
    return f"{', '.join((*READERS, *TEXT_SUFFIXES))} ({packed})"


def read_text(file: RowFile, choose: ChooseColumns, unpacking: Unpacking, position: Position) -> Iterator[RawRow]:
    """The one row of a file of plain text."""
    with _open(file, unpacking) as stream:
        text = stream.read().decode("utf-8-sig", errors="surrogateescape")
    yield file.name, dump_row({"text": text})


def dump_row(row: Any) -> bytes:
    """A row that has been parsed already, as a raw row."""
    try:
        # surrogateescape gives back the bytes that were not UTF-8, for the check to find.
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # half of a character is written as its escape, for the check as well
        return json.dumps(row, default=_as_text).encode("ascii")


def dump_table(table: pa.Table) -> list[bytes]:
    """The rows of a table as raw rows. Of images and the like there is only whether a row has any."""
    for number, name in enumerate(table.column_names):
        kind = table.column(name).type
        if name in NOT_TEXT and (pa.types.is_nested(kind) or any(is_kind(kind) for is_kind in TEXTS)):
            table = table.set_column(number, name, _are_there(table.column(name)))
    return [dump_table_row(row) for row in table.to_pylist()]


def _are_there(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether each value of a column is there, and no empty list or text, or object of such."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0)
    if any(is_kind(kind) for is_kind in TEXTS):
        return pc.greater(pc.fill_null(pc.binary_length(column), 0), 0)
    if pa.types.is_struct(kind) and kind.num_fields:
        return reduce(pc.or_, (_are_there(pc.struct_field(column, [n])) for n in range(kind.num_fields)))
    return column.is_valid()


def dump_table_row(row: dict[str, Any]) -> bytes:
    """A row of a table, as a raw row. Fields of objects in it that are null are left out.

    In a table every object has the fields of all rows: of a call `{"city": "Rome"}` beside a call `{"x": 1}`, Arrow
    makes `{"city": "Rome", "x": null}`, which the model would learn to write.
    """
    return dump_row({name: _without_null(value) for name, value in row.items()})


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(item) for name, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str:
    """Turn into text what JSON has no type for: dates and the like, and text that Parquet stores as bytes."""
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value)


@contextmanager
def _open(file: RowFile, unpacking: Unpacking) -> Iterator[IO[bytes]]:
    """The contents of a file of text, decompressed as they are read, up to the limit.

    Raises:
        DataError: they are UTF-16, or no text.
    """
    decompress = COMPRESSIONS.get(file.suffix)
    with ExitStack() as stack:
        stream = stack.enter_context(file.open())
        contents = stack.enter_context(unpacking.open(stream, decompress))
        if isinstance(contents, io.BufferedReader):
            start = contents.peek(MAGIC_BYTES)
        else:  # a remote file
            start = contents.read(MAGIC_BYTES)
            contents.seek(0)
        kind = next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)
        if kind is not None:
            raise DataError(f"{file} is no text: by its first bytes it is {kind}. Give it the name of what it is.")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(
                f"{file} is UTF-16, as PowerShell's > writes it, and data is read as UTF-8. Convert it: iconv -f UTF-16"
                " -t UTF-8 OLD > NEW, or in PowerShell Get-Content OLD | Set-Content -Encoding utf8 NEW."
            )
        yield contents


def _open_zstd(stream: IO[bytes]) -> IO[bytes]:
    decompressed: Any = pa.input_stream(stream, compression="zstd")
    return io.BufferedReader(decompressed)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_holder(file: RowFile, beginning: bytes) -> None:
    """See that a file is no JSON object that holds rows, under a key or by columns, and no row of several lines.

    Raises:
        DataError: it is one. The message has the command that writes the rows.
    """
    over_lines = DataError(
        f"{file} has a JSON object over several lines, where each row is one line. Write it so: jq -c . {file.name} > "
        f"rows.jsonl, or jq -c '.KEY[]' {file.name} > rows.jsonl where KEY holds the rows."
    )
    begins_object = beginning.partition(b"\n")[0].strip() == b"{"
    try:
        found = json.loads(beginning)
    except (ValueError, RecursionError):
        if begins_object:
            raise over_lines from None
        return
    holders = [key for key, value in found.items() if _is_list_of(value, dict)]
    if len(holders) == 1 and not any(key in found for key in ROW_KEYS):
        raise DataError(
            f"{file} is one JSON object, whose rows are under {holders[0]}. Write them, a line each: "
            f"jq -c '.[\"{holders[0]}\"][]' {file.name} > rows.jsonl."
        )
    lengths = {len(value) for value in found.values() if isinstance(value, list)}
    if len(found) > 1 and len(lengths) == 1 and all(isinstance(value, list) for value in found.values()):
        raise DataError(
            f"{file} is one JSON object with a list for each column. Write a row a line: "
            f"python -c \"import pandas; pandas.read_json('{file.name}').to_json('rows.jsonl', orient='records', "
            'lines=True)".'
        )
    if begins_object:
        raise over_lines


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _read_lines(file: RowFile, unpacking: Unpacking, position: Position) -> Iterator[RawRow]:
    can_seek = file.suffix not in COMPRESSIONS
    with _open(file, unpacking) as lines:
        if position.start:
            lines.seek(position.start)
        start = end = position.start
        last = position.number  # the last line that is a row
        for number, line in enumerate(lines, start=last + 1):
            end += len(line)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if can_seek:
                position.move(start, last)
            start = end
            # Blank lines are rows, and bad ones, only if another row follows.
            yield from ((f"{file.name}:{blank}", b"") for blank in range(last + 1, number))
            last = number
            yield f"{file.name}:{number}", line.rstrip(b"\r\n")


def _read_json(file: RowFile, choose: ChooseColumns, unpacking: Unpacking, position: Position) -> Iterator[RawRow]:
    """Rows of a JSON list, or one row a line, whichever of the two names the file has."""
    with _open(file, unpacking) as stream:
        beginning = stream.read(BEGINNING).removeprefix(b"\xef\xbb\xbf").strip()
    first_line, _, others = beginning.partition(b"\n")
    is_line = _is_json(first_line)
    has_lines = is_line and bool(others.strip())
    may_be_one_row = is_line and ".jsonl" in file.name
    if beginning.startswith(b"{") and not may_be_one_row and not has_lines:
        _refuse_holder(file, beginning)
    if has_lines or not beginning.startswith(b"["):
        yield from _read_lines(file, unpacking, position)
        return
    with _open(file, unpacking) as stream:
        try:
            for number, row in enumerate(read_list(stream), start=1):
                yield f"{file.name} row {number}", row
        except NotAList as error:
            raise DataError(
                f"{file} can't be read as a JSON list: {error}. Repair it, or write a row a line."
            ) from error


def _read_csv(
    file: RowFile, choose: ChooseColumns, unpacking: Unpacking, position: Position, delimiter: str = ","
) -> Iterator[RawRow]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    with _open(file, unpacking) as contents:
        stream = io.TextIOWrapper(contents, encoding="utf-8-sig", errors="surrogateescape", newline="")
        read: list[str] = []  # the lines of a row
        lines = csv.reader(_keep(stream, read), delimiter=delimiter)
        header, last = next(lines, []), _take(read)
        twice = [name for name in header if name and header.count(name) > 1]
        if twice:
            raise DataError(f"{file} has two columns {twice[0]}. Rename one, so that it is clear which is meant.")
        if len(header) == 1 and (other := next((mark for mark in ",;\t|" if mark in header[0]), None)):
            raise DataError(
                f"{file} has {other!r} between its columns, not {delimiter!r}. "
                "Save it with commas as .csv, or with tabs as .tsv."
            )
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
        if last and len(list(csv.reader([*last, '"\n'], delimiter=delimiter))) == 1:
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


def _read_parquet(file: RowFile, choose: ChooseColumns, unpacking: Unpacking, position: Position) -> Iterator[RawRow]:
    with file.open() as stream:
        unpacking.watch(stream)
        with pq.ParquetFile(stream) as table:
            names = choose(table.schema_arrow.names)
            groups, num_before = _groups_from(table, position.start)
            # Where memory has a limit, a thread that can't start would end the process.
            batches = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=names, use_threads=False)
            yield from _read_batches(file, batches, unpacking, position, num_before)


def _groups_from(table: pq.ParquetFile, start: int) -> tuple[list[int], int]:
    """The row groups from that of row `start` on, and the rows before them."""
    ends = list(accumulate(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)))
    first = bisect_right(ends, start)
    return list(range(first, len(ends))), ends[first - 1] if first else 0


def _read_arrow(file: RowFile, choose: ChooseColumns, unpacking: Unpacking, position: Position) -> Iterator[RawRow]:
    """Rows of an Arrow file, in the form of a stream, as `datasets` writes it, or of a file with an index (Feather)."""
    with file.open() as stream:
        unpacking.watch(stream)
        is_indexed = stream.read(len(ARROW_FILE)) == ARROW_FILE
        stream.seek(0)
        if is_indexed:
            table = pa.ipc.open_file(stream)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(stream))
        pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, len(batch), BATCH_ROWS))
        chosen = (piece.select(choose(piece.schema.names)) for piece in pieces)
        yield from _read_batches(file, chosen, unpacking, position, num_before=0)


def _read_batches(
    file: RowFile, batches: Iterator[pa.RecordBatch], unpacking: Unpacking, position: Position, num_before: int
) -> Iterator[RawRow]:
    """The rows of batches, of which the first begins after `num_before` rows. Those before `position` are dropped."""
    number = num_before

    def dump_rows(batch: pa.RecordBatch) -> list[bytes]:
        nonlocal number
        rest = batch.slice(min(len(batch), max(0, position.start - number)))
        number += len(batch) - len(rest)
        return dump_table(pa.Table.from_batches([rest]))

    while (rows := unpacking.take(batches, dump_rows)) is not None:
        if rows:
            position.move(number, number)
        for row in rows:
            number += 1
            yield f"{file.name} row {number}", row


READERS: dict[str, Reader] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
ARROW_FILE = b"ARROW1"  # begins an Arrow file with an index
# How files begin that people have under the name of a file of text.
MAGIC = {
    b"\x1f\x8b": "packed by gzip (.gz)",
    b"\xfd7zXZ\x00": "packed by xz (.xz)",
    b"\x28\xb5\x2f\xfd": "packed by zstd (.zst)",
    b"PK\x03\x04": "a zip archive, as spreadsheets (.xlsx) are too, which is to be unpacked or saved as .csv",
    b"PAR1": "a Parquet file (.parquet)",
}
MAGIC_BYTES = max(map(len, MAGIC))
COMPRESSIBLE = (".jsonl", ".json", ".csv", ".tsv")  # Parquet files are compressed inside
COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    **({".zst": _open_zstd} if pa.Codec.is_available("zstd") else {}),
}
