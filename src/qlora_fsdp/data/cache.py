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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.counts import NUM_EXAMPLES, ProblemCounter, ReadReport
from qlora_fsdp.data.cut import CutSettings, FlatRows, Pieces, cut_rows
from qlora_fsdp.data.tokenize import Mask, TokenRow, Tokens

CACHE_VERSION = 16  # to be raised when the same input gives other tokens
REPORT = "report.json"
PLACES = "places.arrow"  # of every row, for messages
PLACES_A_BATCH = 2**16


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of tokens, memory-mapped.

    Attributes:
        tokens: int32 [num_tokens], all rows one after another.
        is_target: bool [num_tokens], whether a token is trained on, or has a label. A row's first token is never
            trained on, because nothing predicts it.
        starts: int64 [num_rows + 1], where rows begin in `tokens`.
        ends: int64 [num_rows], where they end, if rows are parts of what is there; None: where the next one begins.
        num_targets: int32 [num_rows], targets of each row; 1 for a row that has a label as a whole.
        labels: float32 [sum of num_targets, numbers per label], as `data.labels` reads them; [0, 0] without labels.
        key: the cache entry's name, which tells these rows from any others; empty for rows that are in no entry.
        whole_ends: int64 [num_rows], where the rows end that these are the beginnings of; None: where they end.
    """

    num_answers = 0  # not an annotated field: rows of an entry are compared by what wraps them (data/preferences.py)

    tokens: Tokens
    is_target: Mask
    starts: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    labels: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    key: str = ""
    ends: NDArray[np.int64] | None = None
    whole_ends: NDArray[np.int64] | None = None

    @property
    def whole_lengths(self) -> NDArray[np.int64]:
        """Tokens of the rows before they were cut."""
        return self.lengths if self.whole_ends is None else self.whole_ends - self.starts[:-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts) if self.ends is None else self.ends - self.starts[:-1]

    @property
    def longest_parts(self) -> NDArray[np.int64]:
        return self.lengths

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens before the first target of each row, [num_rows]."""
        targets = np.flatnonzero(self.is_target)
        return np.asarray(targets[np.searchsorted(targets, self.starts[:-1])] - self.starts[:-1])

    def read(self, row: int) -> list[TokenRow]:
        span = slice(self.starts[row], self.starts[row + 1] if self.ends is None else self.ends[row])
        is_target = self.is_target[span]
        if self.ends is not None and is_target[0]:  # of a further piece of a row: nothing stands before it
            is_target = np.concatenate([[False], is_target[1:]])
        return [(self.tokens[span], is_target)]

    def read_whole(self, row: int) -> TokenRow:
        """A row as it was before it was cut."""
        if self.whole_ends is None:
            return self.read(row)[0]
        span = slice(self.starts[row], self.whole_ends[row])
        return self.tokens[span], self.is_target[span]


def check_targets(rows: TokenizedRows, path: str) -> None:
    """Refuses rows that attention can learn nothing from.

    A row's second token is predicted from its first alone, which attends to nothing but itself. Where this is all that
    is trained on, queries and keys have gradients of zeros.

    Args:
        rows: tokens to predict.
        path: the source's path, for the message.

    Raises:
        DataError: no row has another target.
    """
    if not len(rows.num_targets) or rows.num_targets.max() > 1:
        return
    if all(rows.is_target[start + 1] for start in rows.starts[:-1]):
        raise DataError(
            f"{path}: the only target of every row is its second token. It is predicted from the first token alone, so"
            " that attention has nothing to learn. Set training.max_length higher, data.loss_on=all, or give rows with"
            " longer answers."
        )


def fingerprint(tokenizer: PreTrainedTokenizerBase, *parts: Any) -> str:
    """A hash of the tokenizer (vocabulary, rules, special tokens, template) and of JSON values."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left over from the last call, of this process or of the author
        rules.pop(state, None)
    identity = [
        CACHE_VERSION,
        rules,
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
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


@dataclass(frozen=True)
class Entry:
    """A cache entry, mapped into memory.

    Attributes:
        folder: its own.
        whole: its rows, before any is cut.
        flags: uint8 [num_rows], of `cut`.
        report: what was read, without the problems.
        counted: the problems, as `ProblemCounter.to_json` gave them.
    """

    folder: Path
    whole: TokenizedRows
    flags: NDArray[np.uint8]
    report: ReadReport
    counted: dict[str, Any]

    def cut(self, settings: CutSettings) -> tuple[TokenizedRows, ReadReport]:
        """The rows as training uses them, and the report about them."""
        whole, counter = self.whole, ProblemCounter(deepcopy(self.counted))
        flat = FlatRows(whole.tokens, whole.is_target, whole.starts, whole.num_targets, self.flags)
        pieces = cut_rows(flat, settings)
        if pieces is None:
            return whole, replace(self.report, problems=counter.problems())
        rows = TokenizedRows(
            whole.tokens,
            whole.is_target,
            np.append(pieces.starts, len(whole.tokens)),
            pieces.num_targets,
            whole.labels[pieces.rows] if len(whole.labels) else whole.labels,
            f"{whole.key}-{settings.max_length}{'t' if settings.truncates else ''}",
            pieces.ends,
            whole.starts[pieces.rows + 1],
        )
        self._count(counter, pieces)
        num_rows, num_tokens = len(pieces.rows), int(rows.lengths.sum())
        report = replace(self.report, num_used_rows=num_rows, num_tokens=num_tokens, problems=counter.problems())
        return rows, report

    def _count(self, counter: ProblemCounter, pieces: Pieces) -> None:
        for problem in pieces.problems:
            first, more = problem.rows[:NUM_EXAMPLES], problem.rows[NUM_EXAMPLES:]
            for row, (place, beginning) in zip(first.tolist(), _read_places(self.folder / PLACES, first), strict=True):
                detail = beginning or f"{self.whole.lengths[row]} tokens" if problem.detail is None else problem.detail
                counter.add(place, problem.kind, detail, problem.is_kept)
            counter.add_more(problem.kind, len(more), problem.is_kept)


def load_entry(folder: Path) -> Entry:
    """Maps a cache entry into memory.

    Raises:
        OSError, ValueError, KeyError, TypeError: it does not exist, or is not whole.
    """
    found = json.loads((folder / REPORT).read_text(encoding="utf-8"))
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
    )
    return Entry(folder, whole, load("flags.bin", np.uint8, num_rows), report, counted)


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
    for row in (
        table.filter(pa.compute.not_equal(table["problem"], ""))
        .select(["place", "problem", "detail", "tokens"])
        .to_pylist()
    ):
        counter.add(row["place"], row["problem"], row["detail"], len(row["tokens"]) > 0)


def _flat(column: pa.ChunkedArray, dtype: type[np.generic]) -> NDArray[Any]:
    values: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)
