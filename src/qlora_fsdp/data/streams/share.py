"""A rank's share of a window: the rows that it tokenizes, and what the other ranks need to know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.data.chats.told import NUM_PLACES, TOLD
from qlora_fsdp.data.counts import ProblemCounter, RowProblem
from qlora_fsdp.data.files.row_files import RawRow
from qlora_fsdp.data.sequences import Indices
from qlora_fsdp.data.shards import ROWS_A_BATCH
from qlora_fsdp.data.tokenize import Columns, Mask, Tokens
from qlora_fsdp.data.tokenized_rows import explain_unlearnable
from qlora_fsdp.data.workers import MapBatches

IndexedRow = tuple[int, RawRow]  # the number of a raw row in its window, and the row


@dataclass(frozen=True)
class PlacedProblem:
    """What is wrong with a raw row: its number in the window, and what `counts.ProblemCounter.add` takes."""

    row: int
    place: str
    kind: str
    detail: str
    is_kept: bool


@dataclass(frozen=True)
class ToldRows:
    """Rows of which the same is to be told: the flag of `chats.told`, how many they are, and the first few of them.

    Of these it has the number in the window, and the place in the data.
    """

    flag: int
    num_rows: int
    first: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ShareTable:
    """What every rank gets to know of a share.

    Attributes:
        raw_rows: int64 [num_rows], of each token row the number of its raw row in the window, ascending.
        lengths: int64 [num_rows], in tokens.
        num_targets: int32 [num_rows].
        problems: what is wrong with raw rows.
        max_token_id: -1 without rows.
        unlearnable: why attention can learn nothing from these rows; empty if it can, or where there are none.
        told: what the model learns of these rows otherwise than the data says.
    """

    raw_rows: Indices
    lengths: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    problems: tuple[PlacedProblem, ...]
    max_token_id: int
    unlearnable: str
    told: tuple[ToldRows, ...] = ()


@dataclass(frozen=True)
class Share:
    """A tokenized share: its table, and the tokens of each row, [num_rows][length], in the form of `mark_targets`."""

    table: ShareTable
    tokens: list[NDArray[np.int32]]


def tokenize_share(rows: Sequence[IndexedRow], map_batches: MapBatches, path: str) -> Share:
    """Tokenizes raw rows, which are in the order of their numbers. `path` is the data's, for messages."""
    places = {number: place for number, (place, _) in rows}
    # Rows go by their numbers here, because one row may become several, and bad ones come first in their batch.
    parts = (rows[start : start + ROWS_A_BATCH] for start in range(0, len(rows), ROWS_A_BATCH))
    batches: Iterator[Columns] = (
        {"place": [number for number, _ in part], "row": [row for _, (_, row) in part]} for part in parts
    )
    found: list[tuple[int, Tokens, Mask]] = []
    flags: list[int] = []
    problems: list[PlacedProblem] = []
    for out in map_batches(batches):
        columns = ("place", "problem", "detail", "tokens", "is_target", "flags")
        for number, kind, detail, tokens, is_target, row_flags in zip(*(out[name] for name in columns), strict=True):
            if kind:
                problems.append(PlacedProblem(number, places[number], kind, detail, len(tokens) > 0))
            if len(tokens):
                found.append((number, tokens, is_target))
                flags.append(row_flags)
    lengths = np.array([len(tokens) for _, tokens, _ in found], dtype=np.int64)
    num_targets = np.array([int(is_target.sum()) for _, _, is_target in found], dtype=np.int32)
    largest = max((int(tokens.max()) for _, tokens, _ in found), default=-1)
    numbers = np.array([number for number, _, _ in found], dtype=np.int64)
    is_target = np.concatenate([np.zeros(0, bool), *(mask for _, _, mask in found)])
    reason = explain_unlearnable(is_target, np.cumsum([0, *lengths]), lengths, num_targets, path)
    table = ShareTable(
        numbers, lengths, num_targets, tuple(problems), largest, reason, _find_told(numbers, flags, places)
    )
    return Share(table, [mark_targets(tokens, is_target) for _, tokens, is_target in found])


def _find_told(numbers: Indices, flags: Sequence[int], places: Mapping[int, str]) -> tuple[ToldRows, ...]:
    """What is to be told of token rows with these flags, of raw rows with these numbers."""
    told = []
    for flag in TOLD:
        rows = numbers[np.flatnonzero(np.array(flags, dtype=np.int64) & flag)].tolist()
        if rows:
            told.append(ToldRows(flag, len(rows), tuple((row, places[row]) for row in rows[:NUM_PLACES])))
    return tuple(told)


def join_told(tables: Sequence[ShareTable]) -> tuple[ToldRows, ...]:
    """What is to be told of the rows of several shares."""
    joined = []
    for flag in TOLD:
        parts = [told for table in tables for told in table.told if told.flag == flag]
        if parts:
            first = sorted(row for part in parts for row in part.first)
            joined.append(ToldRows(flag, sum(part.num_rows for part in parts), tuple(first[:NUM_PLACES])))
    return tuple(joined)


def join_shares(tables: Sequence[ShareTable], tokens: NDArray[np.int32]) -> Share:
    """The rows of several shares as one, in their order in the window; something can be learned of them together.

    Args:
        tables: the tables of the shares.
        tokens: those of all their rows, one share after another.
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *(table.lengths for table in tables)])
    raw_rows = np.concatenate([np.zeros(0, np.int64), *(table.raw_rows for table in tables)])
    num_targets = np.concatenate([np.zeros(0, np.int32), *(table.num_targets for table in tables)])
    order = np.argsort(raw_rows, kind="stable")
    rows = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    largest = max((table.max_token_id for table in tables), default=-1)
    problems = _problems_of(tables)
    told = join_told(tables)
    table = ShareTable(raw_rows[order], lengths[order], num_targets[order], problems, largest, "", told)
    return Share(table, [rows[row] for row in order])


def count_problems(tables: Sequence[ShareTable], counter: ProblemCounter) -> tuple[RowProblem, ...]:
    """The problems counted so far, and those of all shares of a window in the order of its rows."""
    for problem in _problems_of(tables):
        counter.add(problem.place, problem.kind, problem.detail, problem.is_kept)
    return counter.problems()


def _problems_of(tables: Sequence[ShareTable]) -> tuple[PlacedProblem, ...]:
    """The problems of all shares, in the order of the rows."""
    return tuple(sorted((each for table in tables for each in table.problems), key=lambda each: each.row))


def mark_targets(tokens: Tokens, is_target: Mask) -> NDArray[np.int32]:
    """Tokens with their targets as one array: of a target the complement, which is negative."""
    return np.where(is_target, ~tokens, tokens).astype(np.int32)


def split_targets(marked: NDArray[np.int32]) -> tuple[Tokens, Mask]:
    """The tokens, and which of them are targets, of what `mark_targets` has made."""
    is_target = marked < 0
    return np.where(is_target, ~marked, marked), is_target
