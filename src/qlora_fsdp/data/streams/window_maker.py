"""Makes windows of streamed data, by all ranks together: each reads, tokenizes and keeps a part of each window.

Rows are taken in the order of the files. Of a mix, each next row comes from the data set that is furthest behind its
proportion. A data set that has been read to its end begins anew, so rows never run out. Where none of a window's rows
can be used, the window begins after them, unless all the data is like that. The first window must have usable rows of
each data set. For a window

1. the rank whose turn it is reads the rows of a data set, and hands every rank its share of them: row i of the window
   is that of rank i modulo their number, which spreads long rows evenly;
2. each rank tokenizes its share, and tells the others lengths and bad rows;
3. each rank packs the same lengths, so that all know which rank trains on which row;
4. tokens go to the ranks that train on them, and to rank 0, which keeps the window in a file (`kept_windows`).

Where that file is there, as in a run that resumes, rank 0 begins with all rows at 3., and the others with none. Nothing
but the lengths and the packing is done by every rank, so the CPU time of a job does not grow with its ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import plural
from qlora_fsdp.data.chats.told import tell
from qlora_fsdp.data.counts import ProblemCounter, ReadReport
from qlora_fsdp.data.files.position import Position
from qlora_fsdp.data.files.row_files import RawRow
from qlora_fsdp.data.read import Source, iterate_rows
from qlora_fsdp.data.sequences import Indices, Sequences, SequenceSettings, make_sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.streams.kept_windows import KeptWindows
from qlora_fsdp.data.streams.share import (
    IndexedRow,
    Share,
    ShareTable,
    count_problems,
    join_shares,
    join_told,
    tokenize_share,
)
from qlora_fsdp.data.streams.windows import Place, Window, WindowRows
from qlora_fsdp.data.together import failing_together
from qlora_fsdp.data.tokenized_rows import check_token_ids
from qlora_fsdp.data.workers import MapBatches
from qlora_fsdp.runtime.processes import Processes

Taken = tuple[list[RawRow], Position, int, int | None]  # what `_take` returns, with a rank's share of the rows

log = logging.getLogger("qlora_fsdp")
ROWS_A_READER = 100_000  # of a file that can be sought, after which the next rank reads on


class ReadOn(NamedTuple):
    """How the reading of a window has moved on.

    Attributes:
        positions: how far each data set has been read after it.
        num_ends: how often each came to its end meanwhile.
        repeated: which data sets have fewer rows than were read, in words.
    """

    positions: list[Position]
    num_ends: list[int]
    repeated: list[str]


@dataclass(frozen=True)
class WindowMaker:
    """Reads rows and makes windows of them. Every rank makes the same windows in the same order.

    Attributes:
        sources: the data sets.
        weights: the proportions of the data sets in the rows; they need not sum to 1.
        map_batches: makes token rows of batches of raw rows, as `RowTokenizer` does of one.
        settings: how rows become sequences.
        buffer_rows: raw rows per window.
        vocab_size: number of tokens that the model knows.
        strict: whether a bad row is an error.
        split: says which rank trains on a sequence.
        processes: the ranks, for use by the thread that makes windows alone.
        kept: the files of windows; None: there are none.
    """

    sources: Sequence[Source]
    weights: Sequence[float]
    map_batches: MapBatches
    settings: SequenceSettings
    buffer_rows: int
    vocab_size: int
    strict: bool
    split: BatchSplit
    processes: Processes
    kept: KeptWindows | None = None
    _opened: dict[int, EndlessRows] = field(default_factory=dict)

    def make(self, place: Place) -> Window:
        """Makes the window that begins at `place`, or at the first place after it with a usable row. Collective.

        Raises:
            DataError: the data can't be read or used; raised on every rank.
        """
        counter = ProblemCounter()
        num_read = 0
        num_ends = np.zeros(len(self.sources), dtype=np.int64)
        while True:
            drawn = self._draw(place.num_drawn)
            share, read = self._find_kept(place) or self._tokenize(place.positions, drawn)
            tables: list[ShareTable] = self.processes.gather(share.table, ShareTable)
            num_read += self.buffer_rows
            report = self._check(tables, counter, num_read, read.repeated, place)
            num_drawn = (np.bincount(drawn, minlength=len(self.sources)) + place.num_drawn).tolist()
            used = drawn[np.concatenate([table.raw_rows for table in tables])]
            unused = np.setdiff1d(drawn, used).tolist()
            if not unused or (report.num_used_rows and place.window > 0):
                break
            num_ends += read.num_ends
            self._check_unused(unused, report, place, num_ends)
            place = Place(place.window + 1, place.sequence, num_drawn, read.positions)
        self._keep(place, tables, share, read.positions)
        seed = int(np.random.SeedSequence([self.settings.seed, place.window]).generate_state(1)[0])
        sequences, order = self._pack(tables, share, place.sequence, seed)
        next_place = Place(place.window + 1, place.sequence + len(sequences), num_drawn, read.positions)
        return Window(place, sequences, order, report, next_place)

    def _find_kept(self, place: Place) -> tuple[Share, ReadOn] | None:
        """A window from its file: all rows on rank 0, and on the other ranks none."""
        if self.kept is None:
            return None
        found = self.kept.read(place) if self.processes.is_main else None
        positions: list[Position] | None = self.processes.share(
            None if found is None else found[1], list[Position] | None
        )
        if positions is None:
            return None
        share = join_shares([], np.zeros(0, np.int32)) if found is None else found[0]
        return share, ReadOn(positions, [0] * len(positions), [])

    def _keep(self, place: Place, tables: Sequence[ShareTable], share: Share, positions: Sequence[Position]) -> None:
        """Brings the rows of all ranks to rank 0, which writes them to a file."""
        if self.kept is None:
            return
        flat = np.concatenate([np.zeros(0, np.int32), *share.tokens])
        num_sent, num_received = [0] * len(tables), [0] * len(tables)
        num_sent[0] = len(flat)
        if self.processes.is_main:
            num_received = [int(table.lengths.sum()) for table in tables]
        tokens = self.processes.swap(torch.from_numpy(flat), num_sent, num_received).numpy()
        if self.processes.is_main:
            self.kept.write(place, join_shares(tables, tokens), positions)

    def _tokenize(self, positions: Sequence[Position], drawn: Indices) -> tuple[Share, ReadOn]:
        """This rank's share of a window."""
        raw, read = self._read(positions, drawn)
        with failing_together(self.processes):
            share = tokenize_share(raw, self.map_batches, self._path)
        return share, read

    @property
    def _path(self) -> str:
        return ", ".join(source.path for source in self.sources)

    def _draw(self, num_drawn: Sequence[int]) -> Indices:
        """The data set of each row of a window: [buffer_rows]."""
        drawn = np.zeros(self.buffer_rows, dtype=np.int64)
        if len(self.sources) > 1:
            weights, counts = np.array(self.weights) / sum(self.weights), np.array(num_drawn)
            for row in range(self.buffer_rows):
                drawn[row] = np.argmax(weights * (counts.sum() + 1) - counts)
                counts[drawn[row]] += 1
        return drawn

    def _read(self, positions: Sequence[Position], drawn: Indices) -> tuple[list[IndexedRow], ReadOn]:
        """This rank's share of the raw rows of a window."""
        rank, num_ranks = self.processes.rank, self.processes.num_ranks
        readers = [find_reader_rank(source, position, num_ranks) for source, position in enumerate(positions)]
        taken: dict[int, Taken] = {}
        with failing_together(self.processes):
            for source, reader in enumerate(readers):
                if reader == rank:
                    taken[source] = self._take(source, positions[source], int((drawn == source).sum()))
                else:
                    self._opened.pop(source, None)
        own: list[IndexedRow] = []
        read = ReadOn([], [], [])
        for source, reader in enumerate(readers):
            numbers = np.flatnonzero(drawn == source)
            parts = None
            if source in taken:
                rows, *known = taken.pop(source)
                parts = [(list(compress(rows, numbers % num_ranks == each)), *known) for each in range(num_ranks)]
            mine, end, num_ends, num_rows = self.processes.scatter(parts, Taken, reader)
            own += zip(numbers[numbers % num_ranks == rank].tolist(), mine, strict=True)
            read.positions.append(end)
            read.num_ends.append(num_ends)
            if num_rows is not None and num_rows < len(numbers):
                has = f"{self.sources[source].path} has {plural(num_rows, 'row')}, read over and over"
                read.repeated.append(f"{has} (data.streaming is for data that is larger than the disk)")
        return sorted(own), read

    def _take(self, source: int, position: Position, num_rows: int) -> Taken:
        """The next rows of a data set, the position after them, how often it ended, how many it has if known."""
        opened = self._opened.get(source)
        if opened is None or opened.position != position:
            opened = self._opened[source] = EndlessRows(self.sources[source], position)
        return opened.take(num_rows), replace(opened.position), opened.num_ends, opened.num_rows

    def _check(
        self,
        tables: Sequence[ShareTable],
        counter: ProblemCounter,
        num_read: int,
        repeated: Sequence[str],
        place: Place,
    ) -> ReadReport:
        """What has been read, read again (`repeated`) and left out, over all ranks.

        Args:
            tables: those of all shares.
            counter: has the problems of the rows before that could not be used.
            num_read: rows, these too.
            repeated: as `ReadOn` has it.
            place: the window's. Rows that teach attention nothing are refused in the data's very first window alone:
                there a setting is wrong, and later ones are few among others.

        Raises:
            DataError: the window can't be used.
        """
        num_rows = sum(len(table.lengths) for table in tables)
        skipped = tuple(line for source in self.sources for line in source.skipped)
        problems = count_problems(tables, counter)
        told = tuple(tell(rows.flag, rows.num_rows, [where for _, where in rows.first]) for rows in join_told(tables))
        report = ReadReport(self._path, num_read, num_rows, 0, -1, problems, 0, skipped, tuple(repeated), told=told)
        if report.problems and self.strict:
            raise DataError(f"data.bad_rows=error, and {report}\nRepair these rows, or set data.bad_rows=skip.")
        if not num_rows:
            return report
        check_token_ids(max(table.max_token_id for table in tables), self.vocab_size, self._path)
        used = [table for table in tables if len(table.lengths)]
        if place.window == 0 and all(table.unlearnable for table in used):
            raise DataError(used[0].unlearnable)
        return report

    def _check_unused(
        self, unused: Sequence[int], report: ReadReport, place: Place, num_ends: NDArray[np.int64]
    ) -> None:
        """Says of a window none of whose rows can be used that reading goes on, if it is the first such window.

        The data's very first window ends the run, where a data set (`unused`) has no usable row in it. Then most often
        a setting is wrong, and to read all the data for that could take days.

        Raises:
            DataError: it is the first window, or all the data has been read since the last usable row.
        """
        fix, is_all = "Set data.path, data.columns, data.format or data.loss_on", num_ends.min() >= 2
        if is_all or place.window == 0:  # the first of two ends may be one of a pass that began before
            more = "" if is_all else ", or, if only the first rows are like these, a larger data.buffer_rows"
            of_some = f" of {', '.join(self.sources[each].path for each in unused)}" if report.num_used_rows else ""
            raise DataError(f"There is no usable row{of_some}. {report}\n{fix}{more}.")
        if report.num_rows == self.buffer_rows and self.processes.is_main:
            log.warning(f"Reading on, as no row here can be used. {report}\n{fix} if the others are like these.")

    def _pack(
        self, tables: Sequence[ShareTable], share: Share, first_sequence: int, seed: int
    ) -> tuple[Sequences, Indices]:
        """The sequences of a window, with the tokens of those that this rank trains on, and their order."""
        in_order = np.argsort(np.concatenate([table.raw_rows for table in tables]), kind="stable")
        lengths = np.concatenate([table.lengths for table in tables])[in_order]
        num_targets = np.concatenate([table.num_targets for table in tables])[in_order]
        makers = np.repeat(range(len(tables)), [len(table.lengths) for table in tables])[in_order]

        without_tokens = WindowRows(lengths, num_targets, np.zeros(0, np.int32), np.full(len(lengths), -1))
        sequences = make_sequences(without_tokens, np.arange(len(lengths)), replace(self.settings, seed=seed))
        order = np.random.default_rng(seed).permutation(len(sequences))
        users_of_sequences = np.empty(len(sequences), dtype=np.int64)
        users_of_sequences[order] = self.split.groups_of(first_sequence + np.arange(len(sequences)))
        users = np.empty(len(lengths), dtype=np.int64)
        users[sequences.row_ids] = np.repeat(users_of_sequences, np.diff(sequences.starts))
        return replace(sequences, rows=self._swap(without_tokens, share.tokens, makers, users)), order

    def _swap(
        self, rows: WindowRows, tokens: Sequence[NDArray[np.int32]], makers: Indices, users: Indices
    ) -> WindowRows:
        """Sends tokens from the ranks that have made them to those that train on them.

        Args:
            rows: all rows of the window, without their tokens.
            tokens: those of this rank's share.
            makers: [num_rows], the rank that has made each row.
            users: [num_rows], the group of ranks that trains on it: each rank of it gets the whole row.
        """
        rank = self.processes.rank
        num_ranks = self.processes.num_ranks
        num_slices = self.split.num_slices
        made, used = np.flatnonzero(makers == rank), np.flatnonzero(users == rank // num_slices)
        receivers = (users[made, None] * num_slices + np.arange(num_slices)).ravel()
        to_send = np.argsort(receivers, kind="stable") // num_slices
        received = used[np.argsort(makers[used], kind="stable")]
        flat = np.concatenate([np.zeros(0, np.int32), *(tokens[row] for row in to_send)])
        lengths_sent = np.repeat(rows.lengths[made], num_slices)
        num_sent = np.bincount(receivers, lengths_sent, num_ranks).astype(int).tolist()
        num_received = np.bincount(makers[used], rows.lengths[used], num_ranks).astype(int).tolist()
        found = self.processes.swap(torch.from_numpy(flat), num_sent, num_received).numpy()
        starts = rows.starts.copy()
        starts[received] = np.cumsum(rows.lengths[received]) - rows.lengths[received]
        return replace(rows, tokens=found, starts=starts)


class EndlessRows:
    """A data set that is being read.

    Attributes:
        num_rows: how many rows it has, once they have been read from the first to the last; until then None.
        num_ends: how often the last `take` came to its end.
    """

    def __init__(self, source: Source, position: Position) -> None:
        self.source = source
        self.num_rows: int | None = None
        self.num_ends = 0
        self._begin(position)

    def take(self, num_rows: int) -> list[RawRow]:
        """The next rows.

        Raises:
            DataError: the data set can't be read, or has no rows.
        """
        rows: list[RawRow] = []
        self.num_ends = 0
        while True:
            found = list(islice(self._rows, num_rows - len(rows)))
            rows += found
            self._num_read += len(found)
            if len(rows) == num_rows:
                return rows
            if self._is_from_start:
                self.num_rows = self._num_read
                if self.num_rows == 0:
                    raise DataError(f"{self.source.path} has no rows. Set data.path or data.mix.")
            self.num_ends += 1
            self._begin(Position())

    def _begin(self, position: Position) -> None:
        self.position = replace(position)
        self._is_from_start = position == Position()
        self._num_read = 0
        self._rows = iterate_rows(self.source, self.position)


def find_reader_rank(source: int, position: Position, num_ranks: int) -> int:
    """The rank that reads data set number `source` from a position on, and hands its rows to the others.

    Files are spread over the ranks, and long ones that can be sought piece by piece. What can't be sought stays with
    one rank, because another would have to read it from its beginning.
    """
    piece = 0 if position.hub is not None else position.file + position.number // ROWS_A_READER
    return (source + piece) % num_ranks
