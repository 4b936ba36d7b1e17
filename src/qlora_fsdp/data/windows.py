"""Windows of streamed data: a limited number of rows, tokenized, packed and shuffled.

Rows are read in the order of the files. Of a mix, each next row comes from the data set that is furthest behind its
share. A data set that has been read to its end begins anew, so rows never run out. A window depends on the data, the
settings and its place alone, so every rank makes the same windows, and a run that resumes makes the same ones again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.foreign_files import open_regular
from qlora_fsdp.data.cache import TokenizedRows, check_targets
from qlora_fsdp.data.counts import ProblemCounter, ReadReport
from qlora_fsdp.data.read import Source, iterate_rows
from qlora_fsdp.data.row_files import RawRow
from qlora_fsdp.data.sequences import Indices, Sequences, SequenceSettings, make_sequences
from qlora_fsdp.data.tokenize import Mask, Tokens
from qlora_fsdp.records.record_files import records_in

ROWS_A_BATCH = 100
Tokenize = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


MAX_PLACES_BYTES = 2**28  # of a list of windows: millions of them


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Attributes:
        window: the number of the window, from 0.
        sequence: the number of its first sequence in the run.
        num_drawn: rows taken of each data set so far.
        num_read: how many of these were taken in the present pass over the data set.
    """

    window: int
    sequence: int
    num_drawn: list[int]
    num_read: list[int]


@dataclass(frozen=True)
class Window:
    """The sequences of a part of the data.

    Attributes:
        place: where the window begins.
        sequences: its rows as sequences.
        order: [num_sequences], the order in which they are trained on.
        report: how many rows were read, and which of them are bad.
        next_place: where the next window begins.
    """

    place: Place
    sequences: Sequences
    order: Indices
    report: ReadReport
    next_place: Place


@dataclass(frozen=True)
class DrawnRow:
    """A raw row, and what has been taken of every data set once it has been drawn (see `Place`)."""

    num_drawn: list[int]
    num_read: list[int]
    row: RawRow


@dataclass(frozen=True)
class WindowMaker:
    """Reads rows and makes windows of them.

    Attributes:
        sources: the data sets.
        weights: the data sets' shares of the rows; they need not sum to 1.
        tokenize: makes token rows of raw rows, as `RowTokenizer` does.
        settings: how rows become sequences.
        buffer_rows: raw rows per window.
        vocab_size: number of tokens that the model knows.
        strict: whether a bad row is an error.
    """

    sources: Sequence[Source]
    weights: Sequence[float]
    tokenize: Tokenize
    settings: SequenceSettings
    buffer_rows: int
    vocab_size: int
    strict: bool

    def read(self, start: Place) -> Iterator[DrawnRow]:
        """Rows without end, from `start` on. Rows before it are read again and dropped.

        Raises:
            DataError: a data set can't be read, or has no rows.
        """
        weights = np.array(self.weights) / sum(self.weights)
        num_drawn, num_read = list(start.num_drawn), list(start.num_read)
        passes: list[Iterator[RawRow]] = [iterate_rows(source) for source in self.sources]
        for rows, num_skipped in zip(passes, num_read, strict=True):
            next(islice(rows, num_skipped, num_skipped), None)
        while True:
            source = int(np.argmax(weights * (sum(num_drawn) + 1) - num_drawn))
            row = next(passes[source], None)
            if row is None:
                if not num_read[source]:
                    raise DataError(f"{self.sources[source].path} has no rows. Set data.path or data.mix.")
                passes[source], num_read[source] = iterate_rows(self.sources[source]), 0
                continue
            num_drawn[source] += 1
            num_read[source] += 1
            yield DrawnRow(list(num_drawn), list(num_read), row)

    def make(self, place: Place, rows: Iterator[DrawnRow]) -> Window:
        """Makes the window that begins at `place`, of the next rows of `rows`.

        Raises:
            DataError: the data can't be read or used.
        """
        drawn = list(islice(rows, self.buffer_rows))
        token_rows, report = self._tokenize([row.row for row in drawn])
        seed = int(np.random.SeedSequence([self.settings.seed, place.window]).generate_state(1)[0])
        row_ids = np.arange(len(token_rows.lengths))
        sequences = make_sequences(token_rows, row_ids, replace(self.settings, seed=seed))
        order = np.random.default_rng(seed).permutation(len(sequences))
        end = drawn[-1]
        next_place = Place(place.window + 1, place.sequence + len(sequences), end.num_drawn, end.num_read)
        return Window(place, sequences, order, report, next_place)

    def _tokenize(self, raw: list[RawRow]) -> tuple[TokenizedRows, ReadReport]:
        tokens: list[Tokens] = []
        masks: list[Mask] = []
        counter = ProblemCounter()
        for start in range(0, len(raw), ROWS_A_BATCH):
            places, rows = zip(*raw[start : start + ROWS_A_BATCH], strict=True)
            out = self.tokenize({"place": list(places), "row": list(rows)})
            columns = ("place", "problem", "detail", "tokens", "is_target")
            for name, problem, detail, row, mask in zip(*(out[column] for column in columns), strict=True):
                if problem:
                    counter.add(name, problem, detail, is_kept=len(row) > 0)
                if len(row):
                    tokens.append(row)
                    masks.append(mask)
        path = ", ".join(source.path for source in self.sources)
        skipped = tuple(line for source in self.sources for line in source.skipped)
        report = ReadReport(path, len(raw), len(tokens), 0, -1, counter.problems(), skipped=skipped)
        self._check(report, tokens)
        token_rows = TokenizedRows(
            tokens=np.concatenate(tokens).astype(np.int32),
            is_target=np.concatenate(masks).astype(np.bool_),
            starts=np.cumsum([0, *map(len, tokens)]),
            num_targets=np.array([int(np.sum(mask)) for mask in masks], dtype=np.int32),
            labels=np.zeros((len(tokens), 0), np.float32),
        )
        check_targets(token_rows, path)
        return token_rows, report

    def _check(self, report: ReadReport, tokens: list[Tokens]) -> None:
        if report.problems and self.strict:
            raise DataError(f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip.")
        if not tokens:
            raise DataError(
                f"There is no usable row. {report}\nSet data.path, data.columns, data.format or data.loss_on."
            )
        largest = max(int(max(row)) for row in tokens)
        if largest >= self.vocab_size:
            raise DataError(
                f"The data has token {largest}, but the model has only {self.vocab_size}: the tokenizer is not this "
                "model's. Set model.tokenizer_path to the tokenizer the model was trained with."
            )


def note_place(file: Path, key: str, window: Window) -> None:
    """Appends where a window begins, and what was left out in it, to the run's list of windows."""
    bad_rows = {problem.kind: problem.num_rows for problem in window.report.problems}
    line = {"key": key, **asdict(window.place), "bad_rows": bad_rows}
    records_in(file.parent).append(file.name, json.dumps(line) + "\n")


def find_place(files: Sequence[Path], key: str, sequence: int) -> Place | None:
    """The last window in the lists that has the same key and begins at or before `sequence`; None: there is none."""
    found = None
    for file in files:
        try:
            with open_regular(file.parent, file.name) as stream:
                lines = stream.read(MAX_PLACES_BYTES).splitlines()
        except (OSError, ValueError):
            continue
        for place in (_read_place(line, key) for line in lines):
            if place is not None and place.sequence <= sequence and (found is None or place.sequence > found.sequence):
                found = place
    return found


def _read_place(line: bytes, key: str) -> Place | None:
    """The place in a line of a list of windows; None: it is of other data, or cut off, or nothing that a run writes."""
    try:
        entry = json.loads(line)
        if entry["key"] != key:
            return None
        place = Place(entry["window"], entry["sequence"], list(entry["num_drawn"]), list(entry["num_read"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    numbers = [place.window, place.sequence, *place.num_drawn, *place.num_read]
    return place if all(type(number) is int and number >= 0 for number in numbers) else None
