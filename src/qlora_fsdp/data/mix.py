"""Mix several data sets into one, in which each has the share of rows that its weight asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.config.schema import SHORTEST
from qlora_fsdp.data.answers import Judged, JudgedRows, Paired, PairedRows
from qlora_fsdp.data.sequences import Indices, Rows
from qlora_fsdp.data.tokenize import TokenRow
from qlora_fsdp.data.tokenized_rows import TokenizedRows

MAX_ROWS = 500_000_000  # of an epoch: the numbers of its rows take 8 bytes each, on every rank


@dataclass(frozen=True)
class MixedRows:
    """The rows of several data sets (`parts`), one set after another."""

    parts: tuple[Rows, ...]

    @cached_property
    def starts(self) -> Indices:
        """Where the rows of each part begin, and the number of all rows: int64 [num_parts + 1]."""
        return np.cumsum([0, *(len(part.num_targets) for part in self.parts)])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([part.lengths for part in self.parts])

    @cached_property
    def part_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([part.part_lengths for part in self.parts])

    @property
    def key(self) -> str:
        keys = [part.key for part in self.parts]
        return "+".join(keys) if all(keys) else ""

    @property
    def num_answers(self) -> int:
        return self.parts[0].num_answers

    @cached_property
    def num_targets(self) -> NDArray[np.int32]:
        return np.concatenate([part.num_targets for part in self.parts])

    @cached_property
    def labels(self) -> NDArray[np.float32]:
        return np.concatenate([part.labels for part in self.parts])

    def read(self, row: int) -> list[TokenRow]:
        part, row = self.locate(row)
        return self.parts[part].read(row)

    @cached_property
    def is_good(self) -> NDArray[np.bool_]:
        """The labels of answers, if all parts are such (`answers.Judged`)."""
        return np.concatenate([cast(Judged, part).is_good for part in self.parts])

    @cached_property
    def margins(self) -> NDArray[np.float32] | None:
        """Of pairs (`answers.Paired`), as there."""
        found = [cast(Paired, part).margins for part in self.parts]
        return np.concatenate([margins for margins in found if margins is not None]) if found[0] is not None else None

    def read_mismatched(self, row: int) -> TokenRow:
        """The prompt of a row with another answer of its part."""
        part, row = self.locate(row)
        return cast(Judged, self.parts[part]).read_mismatched(row)

    def locate(self, row: int) -> tuple[int, int]:
        """The part that a row is in, and the row's number there."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return part, row - int(self.starts[part])


def raw_rows_of(rows: Rows) -> Indices:
    """For each row the number of the raw row in its data set that it was made of; in a data set they are ascending."""
    if isinstance(rows, MixedRows):
        return np.concatenate([raw_rows_of(part) for part in rows.parts])
    if isinstance(rows, PairedRows):
        return raw_rows_of(rows.parts)[::2]
    if isinstance(rows, JudgedRows):
        return raw_rows_of(rows.parts)
    if isinstance(rows, TokenizedRows):
        return rows.raw_rows
    return np.arange(len(rows.lengths))


def count_rows(
    num_rows: Sequence[int],
    weights: Sequence[float],
    until: str | int,
    lengths: Sequence[float],
) -> list[int]:
    """How many rows of each data set an epoch has, in the shares of the weights.

    Args:
        num_rows: the rows of each data set.
        weights: the weight of each data set, as a share of the rows.
        until: `longest`: as few as it takes to see every row once. So the data set that is largest for its weight is
            seen once, and the others are repeated. `shortest`: as many as there are without repeating one. So the data
            set that is smallest for its weight is seen once, and of the others a part. A number: as many as have about
            so many tokens, so that each data set may be repeated, or seen in part.
        lengths: the mean length of the rows of each data set, in tokens; for a number of tokens.
    """
    if isinstance(until, int):
        scale = until / sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        return [max(1, round(weight * scale)) for weight in weights]
    if until == SHORTEST:
        scale = min(number / weight for number, weight in zip(num_rows, weights, strict=True))
        return [min(number, max(1, round(weight * scale))) for number, weight in zip(num_rows, weights, strict=True)]
    scale = max(number / weight for number, weight in zip(num_rows, weights, strict=True))
    return [max(number, round(weight * scale)) for number, weight in zip(num_rows, weights, strict=True)]


def repeat_rows(row_ids: Indices, count: int, seed: int, part: int) -> Indices:
    """`count` rows of a data set: all of them as often as they fit, and some (once more), drawn by the seed."""
    times, left = divmod(count, len(row_ids))
    drawn = np.random.default_rng([seed, part]).permutation(row_ids)[:left]
    return np.concatenate([np.tile(row_ids, times), np.sort(drawn)])
