"""Groups the tokenized answers of preference data into units: a pair of answers, or one answer with its label.

Answers are tokenized and cached one by one, as any other rows are. The classes here wrap them and present a whole pair
as one row. So pairs are held out, mixed, packed and batched as a whole, by code that knows nothing of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import TaskName
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.sequences import NO_LABELS, Rows
from qlora_fsdp.data.tokenize import TokenRow


class AnswerRows(Rows, Protocol):
    """Rows of tokens, each a prompt and an answer: `TokenizedRows` or `RandomRows`."""

    @property
    def prompt_lengths(self) -> NDArray[np.int64]: ...

    @property
    def whole_lengths(self) -> NDArray[np.int64]: ...

    def read_whole(self, row: int) -> TokenRow: ...


class Judged(Rows, Protocol):
    """Answers with labels: `JudgedRows`, or a mix of these."""

    @property
    def is_good(self) -> NDArray[np.bool_]: ...

    def read_mismatched(self, row: int) -> TokenRow: ...


class Paired(Rows, Protocol):
    """Pairs of answers: `PairedRows`, or a mix of these."""

    @property
    def margins(self) -> NDArray[np.float32] | None: ...


@dataclass(frozen=True)
class PairedRows:
    """Pairs: rows 2p and 2p + 1 of `parts` are the chosen and the rejected answer of pair p, each after its prompt.

    Attributes:
        parts: the rows of tokens.
        margins: float32 [num_pairs], of rewards; None where none are learned.
    """

    parts: Rows
    margins: NDArray[np.float32] | None = None

    num_answers = 2
    labels = NO_LABELS

    @property
    def key(self) -> str:
        return self.parts.key

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.asarray(self.part_lengths.sum(1))

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.parts.lengths.reshape(-1, 2)

    @property
    def num_targets(self) -> NDArray[np.int32]:
        """A pair has one loss."""
        return np.ones(len(self.lengths), dtype=np.int32)

    def read(self, row: int) -> list[TokenRow]:
        return [*self.parts.read(2 * row), *self.parts.read(2 * row + 1)]


@dataclass(frozen=True)
class JudgedRows:
    """Answers that are good or not, one a row, and for each its prompt with another row's answer.

    The second says how far the model has moved on answers that belong to no prompt (KTO's reference point). The other
    answer is `donors`', whatever batch the row is in, so that a step does not depend on how it is split.

    Attributes:
        parts: the rows of tokens.
        is_good: bool [num_rows], the labels.
        max_length: tokens of a prompt with one answer, at most.
    """

    parts: AnswerRows
    is_good: NDArray[np.bool_]
    max_length: int

    num_answers = 1
    labels = NO_LABELS

    @property
    def key(self) -> str:
        return self.parts.key

    @cached_property
    def donors(self) -> NDArray[np.int64]:
        """For each row the one whose answer follows its prompt instead of its own, [num_rows].

        Rows that follow one another with one prompt, such as the two answers of a pair, are a group, and take their
        answers from the group before; the first one takes the last one's. So where no prompt follows itself it is the
        row before. If all rows have one prompt it is too, as no answer belongs to another one.
        """
        numbers, prompts = np.arange(len(self.is_good)), self.parts.prompt_lengths
        begins = numbers == 0
        begins[1:] = prompts[1:] != prompts[:-1]
        for row in np.flatnonzero(~begins).tolist():
            begins[row] = not np.array_equal(self._prompt(row), self._prompt(row - 1))
        starts = np.flatnonzero(begins)
        if len(starts) == 1:
            return np.roll(numbers, 1)
        group, sizes = np.cumsum(begins) - 1, np.diff(starts, append=len(numbers))
        return np.asarray(starts[group - 1] + (numbers - starts[group]) % sizes[group - 1])

    def _prompt(self, row: int) -> NDArray[np.int32]:
        [(tokens, _)] = self.parts.read(row)
        return tokens[: self.parts.prompt_lengths[row]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The room for either of the two, which are in sequences of their own."""
        prompts = self.parts.prompt_lengths
        mismatched = prompts + (self.parts.whole_lengths - prompts)[self.donors]
        return np.maximum(self.parts.lengths, np.minimum(mismatched, self.max_length))

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.parts.part_lengths

    @property
    def num_targets(self) -> NDArray[np.int32]:
        """An answer has one loss."""
        return np.ones(len(self.is_good), dtype=np.int32)

    def read(self, row: int) -> list[TokenRow]:
        return self.parts.read(row)

    def read_mismatched(self, row: int) -> TokenRow:
        """The prompt of a row with the whole answer of another one (`donors`), cut after this prompt."""
        [(tokens, is_target)] = self.parts.read(row)
        donor = int(self.donors[row])
        others, other_targets = self.parts.read_whole(donor)
        own, other = int(self.parts.prompt_lengths[row]), int(self.parts.prompt_lengths[donor])
        joined = np.concatenate([tokens[:own], others[other:]])
        targets = np.concatenate([is_target[:own], other_targets[other:]])
        return joined[: self.max_length], targets[: self.max_length]


def wrap_answers(rows: AnswerRows, labels: NDArray[Any], spec: DataSpec) -> Rows:
    """The rows of a data set as the task needs them: as they are, unless answers are compared.

    Args:
        rows: rows of tokens.
        labels: [num_rows, 1] of answers with labels, and margins of rewards.
        spec: its task and its lengths are used.
    """
    if not spec.task.compares_answers:
        return rows
    if spec.task.has_pairs:
        has_margins = spec.task.name is TaskName.reward
        return PairedRows(rows, labels[::2, 0].astype(np.float32) if has_margins else None)
    return JudgedRows(rows, labels[:, 0] > 0, spec.max_length)


def check_judged(rows: Rows, row_ids: NDArray[np.int64], names: Sequence[str]) -> None:
    """Refuses answers to train on that are all good or all bad.

    Args:
        rows: the rows of all training data.
        row_ids: those that are trained on. Held-out answers may be of one kind.
        names: what the user calls the data sets.

    Raises:
        DataError: labels are all the same, so that nothing can be learned from them.
    """
    is_good = cast(Judged, rows).is_good[row_ids]
    if is_good.all() or not is_good.any():
        raise DataError(
            f"{', '.join(names)}: every label is {'true' if is_good.all() else 'false'}. preference.loss=kto learns "
            "from good and from bad answers. Add rows of the other kind; for good answers alone set task=causal_lm."
        )
