"""Fit rows to training.max_length: decide into which pieces each is cut, and which are left out.

The cache keeps rows whole, so that another max_length needs no new tokenizing. At every start this module decides anew,
from lengths and targets alone. A stream does the same with each batch that it tokenizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.data.row import NO_TARGET, SAME_ANSWERS, SPLIT, TOO_LONG

# Flags of a row of tokens
MAY_SPLIT = 1  # what is beyond max_length becomes further rows: it is plain text
WITH_BEFORE = 2  # it was one row with the one before: if one of them can't be used, neither is
SAME_ROW = 4  # it was made of the same row of the data as the one before, and each is used without the other


@dataclass(frozen=True)
class FlatRows:
    """Whole rows of tokens, one after another.

    Attributes:
        tokens: int32 [num_tokens].
        is_target: bool [num_tokens]; False for the first token of each row, because nothing predicts it.
        starts: int64 [num_rows + 1], where rows begin.
        num_targets: int32 [num_rows], or as many as count of them.
        flags: uint8 [num_rows], of the above and of `chats.told`.
    """

    tokens: NDArray[np.int32]
    is_target: NDArray[np.bool_]
    starts: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    flags: NDArray[np.uint8]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)


@dataclass(frozen=True)
class CutSettings:
    """How rows are cut.

    Attributes:
        max_length: tokens that a row may have.
        truncates: whether longer ones are cut; else they are left out.
        is_compared: whether rows are answers, of which a loss takes each as a whole: they count as one target.
        is_paired: whether each two answers of a row must differ.
    """

    max_length: int
    truncates: bool
    is_compared: bool = False
    is_paired: bool = False


@dataclass(frozen=True)
class CutProblem:
    """Rows with one problem.

    Attributes:
        kind: one of the kinds of data.row.
        detail: what else there is to say; None: the length of the row.
        is_kept: whether something of them is used.
        rows: int64, those that are told, one of each that was one row of the data.
    """

    kind: str
    detail: str | None
    is_kept: bool
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """The parts of rows that are used.

    Attributes:
        rows: int64 [num_pieces], the row that each piece is of.
        starts: int64 [num_pieces], where it begins in the tokens of all rows.
        ends: int64 [num_pieces], where it ends.
        num_targets: int32 [num_pieces]. The first token of a piece is no target.
        problems: which rows are cut or left out.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    problems: tuple[CutProblem, ...]


def cut_rows(flat: FlatRows, settings: CutSettings) -> Pieces | None:
    """Cuts rows that are too long, and leaves out those of which no target is left.

    Returns:
        The pieces; None: every row is used as it is.
    """
    is_long = flat.lengths > settings.max_length
    if not is_long.any() and flat.num_targets.all():
        return None
    begins = (flat.flags & WITH_BEFORE) == 0
    first, group = np.flatnonzero(begins), np.cumsum(begins) - 1  # rows that go together, by their first and by number
    has_long = np.logical_or.reduceat(is_long, first)
    loses_tokens = np.logical_or.reduceat(is_long & (flat.flags & MAY_SPLIT == 0), first)
    pieces = _cut(flat, settings, is_long) if settings.truncates else all_rows(flat)
    is_used = np.zeros(len(flat.lengths), dtype=bool)
    is_used[pieces.rows[pieces.num_targets > 0]] = True
    is_lost = ~np.logical_and.reduceat(is_used, first)
    is_same = np.zeros(len(first), dtype=bool)
    if settings.truncates and settings.is_paired:
        ends = np.append(first[1:], len(is_long))
        for number in np.flatnonzero(has_long & ~is_lost).tolist():
            pairs = range(first[number], ends[number], 2)
            is_same[number] = any(_are_same(flat, pair, settings.max_length) for pair in pairs)

    long_rows = np.flatnonzero(is_long)
    told = first.copy()
    told[group[long_rows[::-1]]] = long_rows[::-1]  # the first long one of those that go together
    within = f"within {settings.max_length} tokens"
    no_answer = f"{within}, which the prompt alone fills" if settings.is_compared else within
    if settings.truncates:
        is_kept = has_long & ~is_lost & ~is_same
        found = [
            CutProblem(TOO_LONG, None, True, told[is_kept & loses_tokens]),
            CutProblem(SPLIT, None, True, told[is_kept & ~loses_tokens]),
            CutProblem(NO_TARGET, no_answer, False, told[has_long & is_lost]),
            CutProblem(SAME_ANSWERS, within, False, told[is_same]),
        ]
    else:
        found = [CutProblem(TOO_LONG, None, False, told[has_long])]
    found.append(CutProblem(NO_TARGET, "", False, told[is_lost & ~has_long]))
    is_dropped = is_lost | is_same if settings.truncates else is_lost | has_long
    kept = (pieces.num_targets > 0) & ~is_dropped[group][pieces.rows]
    problems = tuple(problem for problem in found if len(problem.rows))
    return Pieces(pieces.rows[kept], pieces.starts[kept], pieces.ends[kept], pieces.num_targets[kept], problems)


def all_rows(flat: FlatRows) -> Pieces:
    """Every row as it is."""
    return Pieces(np.arange(len(flat.lengths)), flat.starts[:-1], flat.starts[1:], flat.num_targets, ())


def _cut(flat: FlatRows, settings: CutSettings, is_long: NDArray[np.bool_]) -> Pieces:
    """The first `max_length` tokens of each row; of one that may be split the others too, as further pieces."""
    length = settings.max_length
    num_pieces = np.where(is_long & (flat.flags & MAY_SPLIT > 0), -(-flat.lengths // length), 1)
    rows = np.repeat(np.arange(len(num_pieces)), num_pieces)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)  # 0, 1, ... in each row
    starts = flat.starts[rows] + length * numbers
    ends = np.minimum(starts + length, flat.starts[rows + 1])
    num_targets, is_target = flat.num_targets[rows], np.asarray(flat.is_target)
    cut = np.flatnonzero(is_long[rows])
    counts = [
        np.count_nonzero(is_target[start + 1 : end])
        for start, end in zip(starts[cut].tolist(), ends[cut].tolist(), strict=True)
    ]
    num_targets[cut] = np.minimum(counts, 1) if settings.is_compared else counts
    return Pieces(rows, starts, ends, num_targets, ())


def _are_same(flat: FlatRows, first: int, max_length: int) -> bool:
    """Whether the two rows from `first` on have the same tokens once they are cut."""
    starts = flat.starts[first : first + 3].tolist()
    chosen, rejected = (flat.tokens[start:end][:max_length] for start, end in pairwise(starts))
    return np.array_equal(chosen, rejected)
