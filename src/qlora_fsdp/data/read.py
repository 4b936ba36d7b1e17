"""Stage 1, read: files or a hub data set → raw rows, each with its place.

Raw rows are bytes that nothing has parsed yet (see `row_files`). Arrow's schema inference never sees them, and 5 GB of
JSONL pass through in constant memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import plural
from qlora_fsdp.config.schema import DataConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.row_files import (
    BROKEN,
    COMPRESSIONS,
    READERS,
    TEXT_SUFFIXES,
    RawRow,
    dump_row,
    find_reader,
    known_suffixes,
    read_text,
)

ROWS_A_BATCH = 1000
MAX_NAMES = 20  # of files that are left out for one reason


@dataclass(frozen=True)
class Source:
    """Where rows come from: local files, or else a hub data set.

    Attributes:
        path: the path or name, as the user gave it.
        files: local files, sorted; empty for a hub data set.
        identity: a JSON value that changes when the contents may have changed.
        hub: the hub data set.
        skipped: which files of a folder are left out, and why; one line per reason.
    """

    path: str
    files: tuple[Path, ...]
    identity: list[Any]
    hub: datasets.Dataset | datasets.IterableDataset | None = None
    skipped: tuple[str, ...] = ()


def find_source(path: str, data: DataConfig) -> Source:
    """Resolves `path` (of `data.path`, `data.mix` or `data.eval_path`) without reading rows. Downloads a hub data set.

    Raises:
        DataError: there is no such file, folder or hub data set, or it is of no known kind.
    """
    root, setting = Path(path).expanduser(), name_setting(path, data)
    skipped: tuple[str, ...] = ()
    if root.is_file():
        if find_reader(root) is None and root.suffix not in TEXT_SUFFIXES:
            raise DataError(f"{setting}={path} is of no known kind. Use one of {known_suffixes()}.")
        found = [root]
    elif root.is_dir():
        found, skipped = _search(root)
        if not found:
            raise DataError(f"{setting}={path} is a folder with no file of {known_suffixes()}.")
    else:
        return _find_on_hub(path, data)
    stats = [file.stat() for file in found]
    identity = [[str(f.resolve()), s.st_size, s.st_mtime_ns] for f, s in zip(found, stats, strict=True)]
    return Source(path, tuple(found), identity, skipped=skipped)


def _search(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a folder that have rows, sorted, and one line for each reason for which others are left out."""
    found: list[Path] = []
    texts: list[Path] = []
    others: dict[str, list[str]] = {}  # by reason
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        # Notebooks, downloads and macOS leave copies and notes there: .ipynb_checkpoints/, .cache/, ._chats.jsonl.
        is_hidden = any(part.startswith(".") for part in name.parts)
        if file.is_dir():
            if file.is_symlink() and not is_hidden:
                others.setdefault("links to folders, which are not followed", []).append(str(name))
        elif is_hidden:
            others.setdefault("names that begin with a dot", []).append(str(name))
        elif not file.is_file():
            others.setdefault("neither files nor folders", []).append(str(name))
        elif find_reader(file) is not None:
            found.append(file)
        elif file.suffix in TEXT_SUFFIXES:
            texts.append(file)
        else:
            others.setdefault("of no known kind", []).append(str(name))
    if found and texts:  # their README and license
        others["text beside files of rows"] = [str(file.relative_to(folder)) for file in texts]
    lines = []
    for reason, names in others.items():
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        lines.append(f"{plural(len(names), 'file')} left out ({reason}): {', '.join(names[:MAX_NAMES])}{more}")
    return found or texts, tuple(lines)


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
    looks_local = path.startswith(("/", ".", "~")) or Path(path).suffix in (*READERS, *COMPRESSIONS, *TEXT_SUFFIXES)
    if looks_local or path.count("/") > 1:
        raise DataError(f"{setting}={path} does not exist. Set {setting} to {known_suffixes()} or a folder of these.")
    try:
        hub = datasets.load_dataset(path, data.name, split=data.split, streaming=data.streaming)
    except Exception as error:  # `datasets` and the hub client raise many unrelated types
        reason = " ".join(str(error).split())
        fix = f"Check the name, or download it and set {setting} to the folder."
        if data.is_default and setting == "data.path":
            fix = "It is the default where no data is named: set data.path to your own file, folder or hub data set."
        raise DataError(
            f"{setting}={path} is no local file or folder, and can't be loaded from the hub"
            f" ({show('data.name', data.name)}, data.split={data.split}): {reason.rstrip('.')}. {fix}"
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
            yield f"{source.path} row {number}", dump_row(row)
    for file in source.files:
        try:
            yield from (find_reader(file) or read_text)(file)
        except BROKEN as error:
            raise DataError(f"{file} can't be read: {error}. Repair it, or leave it out.") from error
