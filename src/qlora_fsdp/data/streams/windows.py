"""Windows of streamed data: a limited number of rows, tokenized, packed and shuffled, and the list of their places.

A window depends on the data, the settings and its place alone. So it is the same at any number of ranks, and a run that
resumes makes the same ones again (see `window_maker`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.foreign_files import open_regular
from qlora_fsdp.data.counts import ReadReport
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.sequences import NO_LABELS, Indices, Sequences
from qlora_fsdp.data.streams.share import split_targets
from qlora_fsdp.data.tokenize import TokenRow
from qlora_fsdp.records.record_files import records_in

MAX_PLACES_BYTES = 2**28  # of a list of windows: millions of them


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Attributes:
        window: the number of the window, from 0.
        sequence: the number of its first sequence in the run.
        num_drawn: rows taken of each data set so far.
        positions: how far each data set has been read in the present pass over it.
    """

    window: int
    sequence: int
    num_drawn: list[int]
    positions: list[Position]

    @classmethod
    def first(cls, num_sources: int) -> Place:
        """The beginning of a mix of `num_sources` data sets."""
        return cls(0, 0, [0] * num_sources, [Position() for _ in range(num_sources)])


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
class WindowRows:
    """The token rows of a window, of which a rank has the tokens of those that it trains on.

    Attributes:
        lengths: int64 [num_rows], tokens of each row.
        num_targets: int32 [num_rows], targets of each row.
        tokens: int32 [num_own_tokens], this rank's rows one after another, in the form of `share.mark_targets`.
        starts: int64 [num_rows], where rows begin in `tokens`; -1 for those of other ranks.
    """

    lengths: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]

    num_answers = 0
    key = ""
    labels = NO_LABELS

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.lengths[:, None]

    def read(self, row: int) -> list[TokenRow]:
        start = self.starts[row]
        assert start >= 0, "another rank has this row"
        return [split_targets(self.tokens[start : start + self.lengths[row]])]


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
        positions = [Position.from_json(position) for position in entry["positions"]]
        place = Place(entry["window"], entry["sequence"], list(entry["num_drawn"]), positions)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    numbers = [place.window, place.sequence, *place.num_drawn]
    return place if all(type(number) is int and number >= 0 for number in numbers) else None
