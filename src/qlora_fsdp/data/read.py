"""Stage 1, read: files or a hub data set → raw rows, each with its place (file and line).

A raw row is the bytes of a JSON object, not yet parsed. So a broken line can't stop the reading, rows may differ in
their keys (Arrow's schema inference never sees them), parsing runs in parallel with tokenizing, and 5 GB of JSONL pass
through in constant memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.config.settings import show

RawRow = tuple[str, bytes]  # place, JSON

TEXT_SUFFIXES = (".txt", ".md")
ROWS_A_BATCH = 1000


@dataclass(frozen=True)
class Source:
    """Where rows come from: local files, or else a hub data set.

    Attributes:
        path: as the user gave it.
        files: local files, sorted; empty for a hub data set.
        identity: changes when the contents may have changed. A JSON value.
        hub: the hub data set.
    """

    path: str
    files: tuple[Path, ...]
    identity: list[Any]
    hub: datasets.Dataset | datasets.IterableDataset | None = None


def find_source(path: str, data: DataConfig) -> Source:
    """Resolves `path` (of `data.path`, `data.mix` or `data.eval_path`) without reading rows. Downloads a hub data set.

    Raises:
        DataError: no such file, folder or hub data set; or a form of file that is not known.
    """
    root, setting = Path(path).expanduser(), name_setting(path, data)
    if root.is_file():
        if root.suffix not in (*READERS, *TEXT_SUFFIXES):
            raise DataError(f"{setting}={path} is of no known kind. Use one of {_known_suffixes()}.")
        found = [root]
    elif root.is_dir():
        below = sorted(file for file in root.rglob("*") if file.is_file())
        # Notebooks, downloads and macOS leave copies and notes there: .ipynb_checkpoints/, .cache/, ._chats.jsonl.
        below = [file for file in below if not any(part.startswith(".") for part in file.relative_to(root).parts)]
        # Text files beside data files are their README and license.
        found = [file for file in below if file.suffix in READERS] or [f for f in below if f.suffix in TEXT_SUFFIXES]
        if not found:
            raise DataError(f"{setting}={path} is a folder with no file of {_known_suffixes()}.")
    else:
        return _find_on_hub(path, data)
    stats = [file.stat() for file in found]
    identity = [[str(f.resolve()), s.st_size, s.st_mtime_ns] for f, s in zip(found, stats, strict=True)]
    return Source(path, tuple(found), identity)


def training_paths(data: DataConfig) -> list[str]:
    """Where the training data is."""
    return list(data.mix) or ([] if data.path is None else [data.path])


def name_setting(path: str, data: DataConfig) -> str:
    """The setting that names `path`: `data.path`, `data.mix` or `data.eval_path`."""
    if path in data.mix:
        return "data.mix"
    return "data.eval_path" if path == data.eval_path and path != data.path else "data.path"


def read_rows(source: Source, file: Path) -> datasets.Dataset:
    """Copies the raw rows of `source` into the Arrow file `file`.

    Returns:
        A memory-mapped data set with the columns `place` (string, such as `chats.jsonl:12`) and `row` (bytes).

    Raises:
        DataError: a file can't be read at all.
    """
    rows = iterate_rows(source)
    schema = pa.schema([("place", pa.string()), ("row", pa.large_binary())])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(rows, ROWS_A_BATCH)):
            places, contents = zip(*batch, strict=True)
            writer.write_batch(pa.record_batch([places, contents], schema=schema))
    return datasets.Dataset.from_file(str(file))


def _find_on_hub(path: str, data: DataConfig) -> Source:
    setting = name_setting(path, data)
    if Path(path).expanduser().exists():  # a pipe, a device
        raise DataError(f"{setting}={path} is neither a file nor a folder. Write the rows to a file first.")
    looks_local = path.startswith(("/", ".", "~")) or Path(path).suffix in (*READERS, *TEXT_SUFFIXES)
    if looks_local or path.count("/") > 1:
        raise DataError(f"{setting}={path} does not exist. Set {setting} to {_known_suffixes()} or a folder of these.")
    try:
        hub = datasets.load_dataset(path, data.name, split=data.split, streaming=data.streaming)
    except Exception as error:  # `datasets` and the hub client raise many unrelated types
        reason = " ".join(str(error).split())
        raise DataError(
            f"{setting}={path} is no local file or folder, and can't be loaded from the hub"
            f" ({show('data.name', data.name)}, data.split={data.split}): {reason} Check the name, or download it and"
            f" set {setting} to the folder."
        ) from error
    state = getattr(hub, "_fingerprint", None)  # none of a stream
    return Source(path, (), ["hub", path, data.name, data.split, state], hub)


def iterate_rows(source: Source) -> Iterator[RawRow]:
    """The raw rows of a source, one after another.

    Raises:
        DataError: a file can't be read at all.
    """
    if source.hub is not None:
        for number, row in enumerate(source.hub, start=1):
            yield f"{source.path} row {number}", _dump(row)
    for file in source.files:
        try:
            yield from READERS.get(file.suffix, _read_text)(file)
        except (OSError, pa.ArrowException, csv.Error) as error:
            raise DataError(f"{file} can't be read: {error}. Repair it, or leave it out.") from error


def _read_jsonl(file: Path) -> Iterator[RawRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield f"{file.name}:{number}", line.rstrip(b"\r\n")


def _read_json(file: Path) -> Iterator[RawRow]:
    with file.open("rb") as stream:
        is_list = stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if not is_list:  # rows a line, under the name .json
        yield from _read_jsonl(file)
        return
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} can't be read as a JSON list: {error}. Repair it, or write a row a line.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file.name} row {number}", _dump(row)


def _read_csv(file: Path) -> Iterator[RawRow]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 KiB
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        read: list[str] = []  # the lines of a row
        lines = csv.reader(_keep(stream, read))
        header, last = next(lines, []), _take(read)
        twice = [name for name in header if name and header.count(name) > 1]
        if twice:
            raise DataError(f"{file} has two columns {twice[0]}. Rename one, so that it is clear which is meant.")
        first_line = lines.line_num + 1  # a quoted cell may hold line breaks
        for cells in lines:
            place = f"{file.name}:{first_line}"
            first_line, last = lines.line_num + 1, _take(read)
            if not cells:
                yield place, b""
            elif len(cells) != len(header):
                yield place, _dump(cells)  # a list: the check refuses it
            else:
                yield place, _dump(dict(zip(header, cells, strict=True)))
        # Of the last row alone: such a quote takes in all that follows it.
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
        for batch in table.iter_batches(batch_size=ROWS_A_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield f"{file.name} row {number}", _dump(row)


def _read_text(file: Path) -> Iterator[RawRow]:
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    yield file.name, _dump({"text": text})


def _dump(row: Any) -> bytes:
    try:
        # surrogateescape gives back the bytes that were not UTF-8, for the check to find.
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # half of a character: its escape, for the check as well
        return json.dumps(row, default=_as_text).encode("ascii")


def _as_text(value: Any) -> str:
    """What JSON does not have: Parquet's text that is not marked as such; dates and the like."""
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _known_suffixes() -> str:
    return ", ".join((*READERS, *TEXT_SUFFIXES))


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
