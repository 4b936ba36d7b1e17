"""Rows of tokens one after another in flat arrays, as a cache entry has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.cut import SAME_ROW, WITH_BEFORE
from qlora_fsdp.data.tokenize import Mask, TokenRow, Tokens


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
        whole_ends: int64 [num_rows], where the rows end that these are pieces of; None: where they end.
        flags: uint8 [num_rows], of `cut`; empty: no row has any.
    """

    num_answers = 0  # not an annotated field: rows of an entry are compared by what wraps them (data/answers.py)

    tokens: Tokens
    is_target: Mask
    starts: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    labels: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    key: str = ""
    ends: NDArray[np.int64] | None = None
    whole_ends: NDArray[np.int64] | None = None
    flags: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def raw_rows(self) -> NDArray[np.int64]:
        """For each row the number of the raw row that it was made of, [num_rows], ascending."""
        begins = np.ones(len(self.num_targets), dtype=bool)
        if len(self.flags):
            begins = (self.flags & (WITH_BEFORE | SAME_ROW)) == 0
        if self.whole_ends is not None:
            begins[1:] &= np.diff(self.whole_ends) > 0
        return np.cumsum(begins)

    @property
    def whole_lengths(self) -> NDArray[np.int64]:
        """Tokens of the rows before they were cut."""
        return self.lengths if self.whole_ends is None else self.whole_ends - self.starts[:-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts) if self.ends is None else self.ends - self.starts[:-1]

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.lengths[:, None]

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


def check_token_ids(largest: int, vocab_size: int, path: str) -> None:
    """Refuses rows of the source `path` with ids that the model has no embeddings for.

    Raises:
        DataError: the largest id is one.
    """
    if largest >= vocab_size:
        raise DataError(
            f"{path} has token {largest}, but the model has only {vocab_size}: the tokenizer is not this model's. Set"
            " model.tokenizer_path to the tokenizer the model was trained with."
        )


def explain_unlearnable(
    is_target: Mask,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_targets: NDArray[np.int32],
    path: str,
) -> str:
    """Explain why attention can learn nothing from rows of the source `path`; empty if it can, or without rows.

    A row's second token is predicted from its first alone, which attends to nothing but itself. Where this is all that
    is trained on, queries and keys have gradients of zeros. The rows are as in `TokenizedRows`.
    """
    if not len(num_targets) or num_targets.max() > 1 or not all(is_target[start + 1] for start in starts[:-1]):
        return ""
    have_more_tokens = int(lengths.max()) > 2  # which data.loss_on=all would train on
    others = "data.loss_on=all, " if have_more_tokens else ""
    return (
        f"{path}: the only target of every row is its second token. It is predicted from the first token alone, so"
        f" that attention has nothing to learn. Set training.max_length higher, {others}or give rows with"
        " longer answers."
    )
