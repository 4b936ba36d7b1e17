"""Stage 5, cache: tokenized rows as flat files, which all ranks of a host map into memory and share.

A cache entry is a folder whose name is a fingerprint of everything that its contents depend on. It gets this name once
it is complete. Its rows are whole: what training.max_length does to them is found out when they are loaded (`cut`), so
that runs with other lengths use the same entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.files import digest_files, write_json
from qlora_fsdp.common.foreign_files import read_digests, read_json_object
from qlora_fsdp.data.chats.told import NUM_PLACES, TOLD, tell
from qlora_fsdp.data.counts import NUM_EXAMPLES, ProblemCounter, ReadReport
from qlora_fsdp.data.cut import CutSettings, FlatRows, Pieces, cut_rows
from qlora_fsdp.data.stop_tokens import stop_ids
from qlora_fsdp.data.template_arguments import template_arguments
from qlora_fsdp.data.tokenized_rows import TokenizedRows

CACHE_VERSION = 24  # to be raised when the same input gives other tokens
REPORT = "report.json"
DIGESTS = "digests.json"  # the SHA-256 of each file, by its name
MAX_REPORT_BYTES = 2**26  # of one of these two; more than any has
PLACES = "places.arrow"  # of every row, for messages
PLACES_A_BATCH = 2**16


def fingerprint(tokenizer: PreTrainedTokenizerBase, *parts: Any) -> str:
    """A hash of the tokenizer, with its stop tokens, its template and what that is given, and of JSON values.

    How the tokenizer truncates and pads is no part of it: that is left over from its last call, in this process or its
    author's, and every call sets it anew.
    """
    rules = tokenizer.backend_tokenizer
    rules.no_truncation()
    rules.no_padding()
    identity = [
        CACHE_VERSION,
        hashlib.sha256(rules.to_str().encode()).hexdigest(),
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        stop_ids(tokenizer),
        template_arguments(tokenizer),
        parts,
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def write_entry(
    folder: Path,
    read: ReadReport,
    tables: Iterable[pa.Table],
    is_compared: bool,
    on_progress: Callable[[int], object],
) -> None:
    """Writes tokenized rows (columns as in tokenize.COLUMNS) to `folder`, which exists and is empty.

    Args:
        folder: where the files go.
        read: what is known of the rows before they are counted. With a label_width, a row without target tokens has
            its label as a whole.
        tables: the rows.
        is_compared: whether a loss belongs to a row as a whole, so that each has at most one target.
        on_progress: called with the number of rows that have been written.
    """
    counter = ProblemCounter()
    num_rows = num_tokens = 0
    max_token_id = -1
    names = ("tokens", "is_target", "starts", "num_targets", "labels", "flags")
    files = {name: (folder / f"{name}.bin").open("wb") for name in names}
    places: list[pa.Table] = []
    try:
        np.zeros(1, np.int64).tofile(files["starts"])
        for table in tables:
            _count(counter, table)
            used = table.filter(pa.compute.greater(pa.compute.list_value_length(table["tokens"]), 0))
            on_progress(len(table))
            if not len(used):
                continue
            tokens, is_target = _flat(used["tokens"], np.int32), _flat(used["is_target"], np.bool_)
            lengths = pa.compute.list_value_length(used["tokens"]).to_numpy().astype(np.int64)
            ends = np.cumsum(lengths)
            num_targets = np.add.reduceat(is_target, ends - lengths, dtype=np.int32)
            if is_compared:
                num_targets = np.minimum(num_targets, 1)
            elif read.label_width:
                num_targets = np.maximum(num_targets, 1)
            columns = (tokens, is_target, num_tokens + ends, num_targets, _flat(used["labels"], np.float32))
            for name, values in zip(names, (*columns, used["flags"].to_numpy()), strict=True):
                values.tofile(files[name])
            places.append(used.select(["place", "detail"]))
            num_rows += len(used)
            num_tokens += len(tokens)
            max_token_id = max(max_token_id, int(tokens.max()))
    finally:
        for file in files.values():
            file.close()
    _write_places(folder / PLACES, places)
    report = replace(read, num_used_rows=num_rows, num_tokens=num_tokens, max_token_id=max_token_id)
    found = {**report.to_json(), "counted": counter.to_json()}
    (folder / REPORT).write_text(json.dumps(found, indent=1), encoding="utf-8")
    write_json(folder / DIGESTS, digest_files(folder, sorted(file.name for file in folder.iterdir())))


@dataclass(frozen=True)
class Entry:
    """A cache entry, mapped into memory.

    Attributes:
        folder: its own.
        whole: its rows, before any is cut.
        report: what was read, without the problems.
        counted: the problems, as `ProblemCounter.to_json` gave them.
    """

    folder: Path
    whole: TokenizedRows
    report: ReadReport
    counted: dict[str, Any]

    def cut(self, settings: CutSettings) -> tuple[TokenizedRows, ReadReport]:
        """The rows as training uses them, and the report about them."""
        whole, counter = self.whole, ProblemCounter(deepcopy(self.counted))
        flat = FlatRows(whole.tokens, whole.is_target, whole.starts, whole.num_targets, whole.flags)
        pieces = cut_rows(flat, settings)
        told = tuple(self._tell())
        if pieces is None:
            return whole, replace(self.report, problems=counter.problems(), told=told)
        rows = TokenizedRows(
            whole.tokens,
            whole.is_target,
            np.append(pieces.starts, len(whole.tokens)),
            pieces.num_targets,
            whole.labels[pieces.rows] if len(whole.labels) else whole.labels,
            f"{whole.key}-{settings.max_length}{'t' if settings.truncates else ''}",
            pieces.ends,
            whole.starts[pieces.rows + 1],
            whole.flags[pieces.rows],
        )
        self._count(counter, pieces)
        num_rows, num_tokens = len(pieces.rows), int(rows.lengths.sum())
        problems = counter.problems()
        report = replace(self.report, num_used_rows=num_rows, num_tokens=num_tokens, problems=problems, told=told)
        return rows, report

    def _tell(self) -> Iterator[str]:
        """Yields what the model learns otherwise than the data says, each with the number of rows and the first."""
        for flag in TOLD:
            rows = np.flatnonzero(self.whole.flags & flag)
            if len(rows):
                places = [place for place, _ in _read_places(self.folder / PLACES, rows[:NUM_PLACES])]
                yield tell(flag, len(rows), places)

    def _count(self, counter: ProblemCounter, pieces: Pieces) -> None:
        for problem in pieces.problems:
            first, more = problem.rows[:NUM_EXAMPLES], problem.rows[NUM_EXAMPLES:]
            for row, (place, beginning) in zip(first.tolist(), _read_places(self.folder / PLACES, first), strict=True):
                detail = beginning or f"{self.whole.lengths[row]} tokens" if problem.detail is None else problem.detail
                counter.add(place, problem.kind, detail, problem.is_kept)
            counter.add_more(problem.kind, len(more), problem.is_kept)


def find_damage(folder: Path) -> str | None:
    """What is wrong with the bytes of an entry, each of which is read; None: they are those that were written.

    A disk that changes a byte would otherwise train another adapter, and nobody would know.

    Raises:
        OSError, ValueError, TypeError: it does not exist, or is not whole.
    """
    written = read_json_object(folder / DIGESTS, MAX_REPORT_BYTES)
    found = read_digests(folder, written)
    changed = [name for name, digest in written.items() if found[name] != digest]
    return f"{folder / changed[0]} has other bytes than were written" if changed else None


def load_entry(folder: Path) -> Entry:
    """Maps a cache entry into memory.

    Raises:
        OSError, ValueError, KeyError, TypeError: it does not exist, or is not whole.
    """
    found = read_json_object(folder / REPORT, MAX_REPORT_BYTES)
    counted = found.pop("counted")
    report = ReadReport.from_json(found)

    def load(name: str, dtype: type[np.generic], length: int) -> NDArray[Any]:
        size, expected = (folder / name).stat().st_size, length * np.dtype(dtype).itemsize
        if size != expected:
            raise ValueError(f"{folder / name} has {size} bytes, not {expected}")
        if not length:
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(folder / name, dtype=dtype, mode="r", shape=(length,)))  # slices are cheaper

    num_rows, width = report.num_used_rows, report.label_width
    num_labels = (folder / "labels.bin").stat().st_size // (4 * width) if width else 0
    whole = TokenizedRows(
        tokens=load("tokens.bin", np.int32, report.num_tokens),
        is_target=load("is_target.bin", np.bool_, report.num_tokens),
        starts=np.array(load("starts.bin", np.int64, num_rows + 1)),
        num_targets=np.array(load("num_targets.bin", np.int32, num_rows)),
        labels=np.array(load("labels.bin", np.float32, num_labels * width)).reshape(num_labels, width),
        key=folder.name,
        flags=load("flags.bin", np.uint8, num_rows),
    )
    return Entry(folder, whole, report, counted)


def _write_places(file: Path, tables: list[pa.Table]) -> None:
    """Writes where rows come from, so that those of a few rows are found again without reading all."""
    schema = pa.schema([("place", pa.string()), ("detail", pa.string())])
    places = pa.concat_tables([schema.empty_table(), *tables])
    compression = "zstd" if pa.Codec.is_available("zstd") else None
    with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for start in range(0, len(places), PLACES_A_BATCH):
            (batch,) = places.slice(start, PLACES_A_BATCH).combine_chunks().to_batches()
            writer.write_batch(batch)


def _read_places(file: Path, rows: NDArray[np.int64]) -> Iterator[tuple[str, str]]:
    """Read each row's place in the data, and its length if only its beginning was tokenized."""
    with pa.memory_map(str(file)) as stream, pa.ipc.open_file(stream) as reader:
        for row in rows.tolist():
            batch, number = reader.get_batch(row // PLACES_A_BATCH), row % PLACES_A_BATCH
            yield batch["place"][number].as_py(), batch["detail"][number].as_py()


def _count(counter: ProblemCounter, table: pa.Table) -> None:
    """Counts the rows of a table that have a problem."""
    bad = table.filter(pa.compute.not_equal(table["problem"], ""))
    for row in bad.select(["place", "problem", "detail", "tokens"]).to_pylist():
        counter.add(row["place"], row["problem"], row["detail"], len(row["tokens"]) > 0)


def _flat(column: pa.ChunkedArray, dtype: type[np.generic]) -> NDArray[Any]:
    values: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)
