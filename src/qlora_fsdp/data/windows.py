"""Data that is read while it is trained on, for more of it than the disk holds.

Rows are read in the order of the files, of a mix in the shares of its weights, without end: a data set that is read to
its end begins anew. `data.buffer_rows` of them at a time, a window, are tokenized, packed and shuffled, in a thread,
while the window before is trained on. A window is a function of data and settings alone, and every rank makes each, so
that the global batches are the same at any number of ranks. Where windows begin is written to run.folder/stream.jsonl:
a run that goes on reads its data up to there, and tokenizes from there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.cache import TokenizedRows
from qlora_fsdp.data.counts import NUM_EXAMPLES, ReadReport, RowProblem
from qlora_fsdp.data.read import RawRow, Source, iterate_rows
from qlora_fsdp.data.sequences import Indices, Sequences, make_sequences
from qlora_fsdp.data.tokenize import Mask, Tokens
from qlora_fsdp.records.run_folder import writing

ROWS_A_BATCH = 100
Tokenize = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Attributes:
        window: its number.
        sequence: number of its first sequence.
        num_drawn: rows taken of each data set so far.
        num_read: of these, in the present pass over the data set.
    """

    window: int
    sequence: int
    num_drawn: list[int]
    num_read: list[int]


@dataclass(frozen=True)
class Window:
    """Sequences of a part of the data.

    Attributes:
        place: where it begins.
        sequences: packed rows.
        order: [num_sequences], the order in which they are trained on.
        report: rows read, and which are bad.
        next_place: where the next one begins.
    """

    place: Place
    sequences: Sequences
    order: Indices
    report: ReadReport
    next_place: Place


class StreamedSequences:
    """What `Sequences` is to data that is there as a whole, for the loop.

    Args:
        sources: the data sets.
        weights: their shares of the rows.
        tokenize: makes token rows of raw ones, as `RowTokenizer` does.
        num_sequences: that the run trains on.
        num_kept: sequences behind the newest one asked for that may still be asked for.
        buffer_rows: rows of a window.
        max_length: tokens a sequence, at most.
        pad_token_id: fills sequences up.
        packing: put several rows into a sequence.
        seed: of packing and order.
        vocab_size: of the model.
        strict: a bad row is an error.
        key: tells data and settings from others; hexadecimal.
        start: where to begin; None: at the beginning.
        note: called with every window, in the thread that makes it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        tokenize: Tokenize,
        *,
        num_sequences: int,
        num_kept: int,
        buffer_rows: int,
        max_length: int,
        pad_token_id: int,
        packing: bool,
        seed: int,
        vocab_size: int,
        strict: bool,
        key: str,
        start: Place | None = None,
        note: Callable[[Window], None] = lambda window: None,
    ) -> None:
        self.sources, self.weights, self.tokenize = sources, np.array(weights) / sum(weights), tokenize
        self.num_sequences, self.num_kept, self.buffer_rows = num_sequences, num_kept, buffer_rows
        self.max_length, self.pad_token_id, self.is_packed = max_length, pad_token_id, packing
        self.seed, self.vocab_size, self.strict, self.note = seed, vocab_size, strict, note
        self.key = key
        nothing = [0] * len(sources)
        start = start or Place(0, 0, nothing, nothing)
        self._rows = self._read(start)
        self._lock, self._windows = threading.Lock(), [self._make(start)]
        self._next = self._make_ahead()

    def __len__(self) -> int:
        return self.num_sequences

    has_labels = False

    @property
    def first_window(self) -> Window:
        """The window that the run begins, or goes on, in."""
        return self._windows[0]

    def describe(self) -> dict[str, int]:
        """What tells this data from other data."""
        return {"stream": int(self.key[:12], 16)}

    def order(self, first: int, last: int, seed: int) -> Indices:
        """The sequences first to last of the run: in the order that their windows have already."""
        return np.arange(first, last)

    def lengths_of(self, indices: Indices) -> NDArray[np.int64]:
        """Tokens of sequences, [len(indices)]."""
        found = [self._find(int(index)) for index in indices]
        return np.array([sequences.lengths[local] for sequences, local in found], dtype=np.int64)

    def num_target_tokens(self, indices: Indices) -> int:
        """Positions with a target in these sequences."""
        found = [self._find(int(index)) for index in indices]
        return sum(int(sequences.num_targets[local]) for sequences, local in found)

    def rows_of(self, sequence: int) -> list[tuple[Tokens, Mask]]:
        """The rows of a sequence: tokens, and which of them are trained on."""
        sequences, local = self._find(sequence)
        return sequences.rows_of(local)

    def labels_of(self, indices: Indices) -> NDArray[np.float32]:
        """No labels: classifiers are not trained on streams."""
        return np.zeros((len(indices), 0), dtype=np.float32)

    def _find(self, index: int) -> tuple[Sequences, int]:
        """The window's sequences, and the number there, of a sequence of the run."""
        with self._lock:
            while index >= self._windows[-1].next_place.sequence:
                self._windows.append(self._next.result())
                self._next = self._make_ahead()
            oldest = index - self.num_kept
            self._windows = [w for w in self._windows if w.next_place.sequence > oldest]
            window = next(w for w in reversed(self._windows) if w.place.sequence <= index)
        return window.sequences, int(window.order[index - window.place.sequence])

    def _make_ahead(self) -> Future[Window]:
        future: Future[Window] = Future()
        place = self._windows[-1].next_place

        def work() -> None:
            try:
                future.set_result(self._make(place))
            except BaseException as error:  # for whoever asks for the window
                future.set_exception(error)

        threading.Thread(target=work, name="stream", daemon=True).start()
        return future

    def _make(self, place: Place) -> Window:
        tokens, masks, bad = [], [], dict[str, list[tuple[str, bool]]]()
        raw = list(islice(self._rows, self.buffer_rows))
        for start in range(0, len(raw), ROWS_A_BATCH):
            places, rows = zip(*(row for _, row in raw[start : start + ROWS_A_BATCH]), strict=True)
            out = self.tokenize({"place": list(places), "row": list(rows)})
            columns = ("place", "problem", "detail", "tokens", "is_target")
            for name, problem, detail, row, mask in zip(*(out[column] for column in columns), strict=True):
                if problem:
                    bad.setdefault(problem, []).append((f"{name} ({detail})" if detail else name, len(row) > 0))
                if len(row):
                    tokens.append(row)
                    masks.append(mask)
        problems = tuple(
            RowProblem(kind, len(rows), sum(kept for _, kept in rows), tuple(text for text, _ in rows[:NUM_EXAMPLES]))
            for kind, rows in bad.items()
        )
        report = ReadReport(", ".join(s.path for s in self.sources), len(raw), len(tokens), 0, -1, problems)
        if problems and self.strict:
            raise DataError(f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip.")
        if not tokens:
            raise DataError(f"There is no usable row. {report}\nSet data.path, data.format or data.loss_on.")
        largest = max(int(max(row)) for row in tokens)
        if largest >= self.vocab_size:
            raise DataError(
                f"The data has token {largest}, but the model has only {self.vocab_size}: the tokenizer is not this "
                "model's. Set model.tokenizer_path to the tokenizer the model was trained with."
            )
        seed = int(np.random.SeedSequence([self.seed, place.window]).generate_state(1)[0])
        token_rows = TokenizedRows(
            tokens=np.concatenate(tokens).astype(np.int32),
            is_target=np.concatenate(masks).astype(np.bool_),
            starts=np.cumsum([0, *map(len, tokens)]),
            num_targets=np.array([int(np.sum(mask)) for mask in masks], dtype=np.int32),
            labels=np.zeros((len(tokens), 0), np.float32),
        )
        sequences = make_sequences(
            token_rows,
            np.arange(len(tokens)),
            max_length=self.max_length,
            pad_token_id=self.pad_token_id,
            packing=self.is_packed,
            seed=seed,
        )
        drawn = [state for state, _ in raw][-1]
        next_place = Place(place.window + 1, place.sequence + len(sequences), *drawn)
        order = np.random.default_rng(seed).permutation(len(sequences))
        window = Window(place, sequences, order, report, next_place)
        self.note(window)
        return window

    def _read(self, start: Place) -> Iterator[tuple[tuple[list[int], list[int]], RawRow]]:
        """Rows without end, each with what has been taken of every data set after it.

        The next row is of the data set that is furthest behind its share.
        """
        drawn, read = list(start.num_drawn), list(start.num_read)
        passes: list[Iterator[RawRow]] = [iterate_rows(source) for source in self.sources]
        for rows, num_skipped in zip(passes, read, strict=True):
            next(islice(rows, num_skipped, num_skipped), None)
        while True:
            source = int(np.argmax(self.weights * (sum(drawn) + 1) - drawn))
            row = next(passes[source], None)
            if row is None:
                if not read[source]:
                    raise DataError(f"{self.sources[source].path} has no rows. Set data.path or data.mix.")
                passes[source], read[source] = iterate_rows(self.sources[source]), 0
                continue
            drawn[source] += 1
            read[source] += 1
            yield (list(drawn), list(read)), row


def note_place(file: Path, key: str, window: Window) -> None:
    """Append where a window begins, and what was left out in it, to the run's list of them.

    Raises:
        RunFolderError: the run folder can't be written.
    """
    bad_rows = {problem.kind: problem.num_rows for problem in window.report.problems}
    line = {"key": key, **asdict(window.place), "bad_rows": bad_rows}
    with writing(file.parent), file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def find_place(files: Sequence[Path], key: str, sequence: int) -> Place | None:
    """The last window noted, of the same data and settings, that does not begin behind `sequence`; None: none is."""
    found = None
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            is_later = found is None or entry["sequence"] > found.sequence
            if entry["key"] == key and entry["sequence"] <= sequence and is_later:
                found = Place(entry["window"], entry["sequence"], entry["num_drawn"], entry["num_read"])
    return found
