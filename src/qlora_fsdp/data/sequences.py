"""Stage 6, sequences: the units of a batch. With packing a sequence is several rows, otherwise it is one row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.tokenize import TokenRow

Indices = NDArray[np.int64]
NO_LABELS = np.zeros((0, 0), np.float32)  # of rows without labels


@dataclass(frozen=True)
class SequenceSettings:
    """How rows become sequences. `seed` decides which rows of the same length go together."""

    max_length: int
    pad_token_id: int
    packing: bool
    seed: int

    @classmethod
    def of(cls, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> SequenceSettings:
        """The settings of a run; the tokenizer has a pad token."""
        assert isinstance(tokenizer.pad_token_id, int)
        return cls(spec.sequence_length, tokenizer.pad_token_id, spec.packs_rows, spec.seed)


class Rows(Protocol):
    """The rows that sequences are made of.

    `TokenizedRows`, `RandomRows` and a stream's `windows.WindowRows` are rows of tokens; `answers.PairedRows` and
    `JudgedRows` are answers to compare; `mix.MixedRows` has the rows of several data sets.

    Attributes:
        lengths: the room that each takes in a sequence, in tokens.
        part_lengths: [num_rows, num_parts], the tokens that each has. A pair has two parts, which stay together.
        num_answers: for preferences, how many answers each has: 2 in a pair, 1 with a label; 0 where tokens or labels
            are predicted.
        key: tells these rows from any others; empty where nothing does.
    """

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    @property
    def part_lengths(self) -> NDArray[np.int64]: ...

    @property
    def num_answers(self) -> int: ...

    @property
    def key(self) -> str: ...

    @property
    def num_targets(self) -> NDArray[np.int32]: ...

    @property
    def labels(self) -> NDArray[np.float32]: ...

    def read(self, row: int) -> list[TokenRow]: ...


class TrainingData(Protocol):
    """The interface of data to the training loop: `Sequences` and `stream.StreamedSequences` have it."""

    @property
    def max_length(self) -> int: ...

    @property
    def pad_token_id(self) -> int: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def has_labels(self) -> bool: ...

    @property
    def num_answers(self) -> int: ...

    def __len__(self) -> int: ...

    def order(self, first: int, last: int, seed: int) -> Indices: ...

    def lengths_of(self, indices: Indices) -> NDArray[np.int64]: ...

    def num_tokens(self, indices: Indices) -> int: ...

    def num_target_tokens(self, indices: Indices) -> int: ...

    def labels_of(self, indices: Indices) -> NDArray[np.float32]: ...

    def rows_of(self, sequence: int) -> list[TokenRow]: ...

    def describe(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class RandomRows:
    """Rows of random tokens, for dry runs. Each row is made when it is read, from the seed and its number."""

    num_rows: int
    length: int
    vocab_size: int
    seed: int

    num_answers = 0
    key = ""
    labels = NO_LABELS

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.full(self.num_rows, self.length, dtype=np.int64)

    @property
    def whole_lengths(self) -> NDArray[np.int64]:
        return self.lengths

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.lengths[:, None]

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        return np.ones(self.num_rows, dtype=np.int64)

    @property
    def num_targets(self) -> NDArray[np.int32]:
        return np.full(self.num_rows, self.length - 1, dtype=np.int32)

    def read(self, row: int) -> list[TokenRow]:
        rng = np.random.default_rng([self.seed, row])
        tokens = rng.integers(self.vocab_size, size=self.length, dtype=np.int32)
        return [(tokens, np.arange(self.length) > 0)]

    def read_whole(self, row: int) -> TokenRow:
        return self.read(row)[0]


@dataclass(frozen=True)
class Sequences:
    """Sequences over rows.

    Attributes:
        rows: the rows. Not all of them need be in use.
        row_ids: int64 [num_rows], the rows in use, ordered by sequence.
        starts: int64 [num_sequences + 1], where sequences begin in `row_ids`.
        max_length: tokens per sequence, at most.
        pad_token_id: the token that fills sequences up.
        is_packed: whether sequences may hold several rows.
        reference: float32 [len(rows), 2], log-probabilities of answers under the model before training (see
            `Batch.reference`); None where each step computes them, or where none are needed.
        group_size: how many sequences, one after another, are of like lengths (`group_by_length`); 0: no order by
            lengths.
    """

    rows: Rows
    row_ids: Indices
    starts: Indices
    max_length: int
    pad_token_id: int
    is_packed: bool
    reference: NDArray[np.float32] | None = None
    group_size: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def num_targets(self) -> NDArray[np.int64]:
        """Positions with a target of each sequence, [num_sequences]."""
        return self._sum_rows(self.rows.num_targets)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The room that each sequence takes, in tokens, [num_sequences]."""
        return self._sum_rows(self.rows.lengths)

    @cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """Tokens of each sequence, [num_sequences]."""
        return self._sum_rows(self.rows.part_lengths.sum(1))

    def _sum_rows(self, values: NDArray[np.integer]) -> NDArray[np.int64]:
        """The sum over each sequence, [num_sequences], of a number for each of `rows`."""
        return np.add.reduceat(values[self.row_ids], self.starts[:-1], dtype=np.int64)

    @property
    def num_answers(self) -> int:
        """`Rows.num_answers`."""
        return self.rows.num_answers

    @property
    def longest_part(self) -> int:
        """Tokens of the longest row of tokens that is in use."""
        lengths = self.rows.part_lengths if self.num_answers == 2 else self.rows.lengths
        return int(lengths[self.row_ids].max())

    @property
    def has_labels(self) -> bool:
        """Whether rows, or their target tokens, have labels. Each row is a sequence then."""
        return bool(self.rows.labels.shape[1])

    def labels_of(self, indices: Indices) -> NDArray[np.float32]:
        """Labels of sequences of one row each, one sequence after another: [num_labels, numbers per label]."""
        assert not self.is_packed
        rows = self.row_ids[indices]
        counts, ends = self.rows.num_targets[rows], self._label_ends[rows]
        return self.rows.labels[np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())]

    @cached_property
    def _label_ends(self) -> NDArray[np.int64]:
        """Where the labels of each row end in `rows.labels`, [len(rows)]."""
        return np.cumsum(self.rows.num_targets, dtype=np.int64)

    def describe(self) -> dict[str, int]:
        """Numbers that tell this data from other data, or from its rows in another order, for a run that resumes."""
        tokens, targets = int(self.lengths.sum()), int(self.num_targets.sum())
        order = crc32(np.stack([self.rows.lengths, self.rows.num_targets]).tobytes())
        return {"num_sequences": len(self), "num_tokens": tokens, "num_target_tokens": targets, "row_order": order}

    def order(self, first: int, last: int, seed: int) -> Indices:
        """The sequences `first` to `last` of a run, in which one epoch's order follows another's."""
        parts = []
        while first < last:
            epoch, offset = divmod(first, len(self))
            parts.append(self._order_of(seed, epoch)[offset : offset + last - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def _order_of(self, seed: int, epoch: int) -> Indices:
        """The order of an epoch, which every step asks for."""
        order = epoch_order(len(self), seed, epoch)
        if self.group_size == 0:
            return order
        if (seed, epoch) not in self._grouped:
            self._grouped.clear()
            self._grouped[seed, epoch] = group_by_length(order, self.lengths, self.group_size)
        return self._grouped[seed, epoch]

    @cached_property
    def _grouped(self) -> dict[tuple[int, int], Indices]:
        """The order of the last epoch that was asked for, by seed and epoch."""
        return {}

    def lengths_of(self, indices: Indices) -> NDArray[np.int64]:
        """The room that sequences take, in tokens, [len(indices)]."""
        return self.lengths[indices]

    def num_tokens(self, indices: Indices) -> int:
        """Tokens of these sequences."""
        return int(self.token_counts[indices].sum())

    def num_target_tokens(self, indices: Indices) -> int:
        """Number of positions with a target in these sequences, which is the weight of their mean loss."""
        return int(self.num_targets[indices].sum())

    def row_ids_of(self, sequence: int) -> Indices:
        """The rows of a sequence, by their index in `rows`."""
        return self.row_ids[self.starts[sequence] : self.starts[sequence + 1]]

    def rows_of(self, sequence: int) -> list[TokenRow]:
        """The rows of a sequence: tokens, and which of them are trained on."""
        return [part for row in self.row_ids_of(sequence) for part in self.rows.read(int(row))]


@lru_cache(maxsize=2)  # every step asks for it
def epoch_order(num_sequences: int, seed: int, epoch: int) -> Indices:
    """The order of sequences in an epoch, [num_sequences]."""
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)


def group_by_length(order: Indices, lengths: NDArray[np.int64], size: int) -> Indices:
    """An order in which sequences of like lengths follow one another, as that of transformers' group_by_length.

    Some groups' sequences at a time, at most 50 and at most a quarter of all, are sorted by falling lengths. The
    longest of all comes first, so that a run for which it is too long ends at once.

    Args:
        order: a random order of all sequences.
        lengths: of each sequence, in tokens.
        size: sequences of a group.
    """
    num_groups = max(1, min(len(order) // (size * 4), 50))
    parts = np.split(order, range(num_groups * size, len(order), num_groups * size))
    parts = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    longest = int(np.argmax([lengths[part[0]] for part in parts]))
    parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
    return np.concatenate(parts)


def make_sequences(
    rows: Rows, row_ids: Indices, settings: SequenceSettings, room: NDArray[np.int64] | None = None
) -> Sequences:
    """Packs the rows `row_ids` of `rows` into sequences, or makes each of them a sequence.

    Args:
        rows: the rows.
        row_ids: those of them to use.
        settings: whether and how to pack.
        room: the tokens that each of `rows` takes of a sequence that is packed; None: its own.
    """
    if settings.packing:
        lengths = rows.lengths if room is None else room
        order, starts = assign_packs(lengths[row_ids], settings.max_length, settings.seed)
        row_ids = row_ids[order]
    else:
        starts = np.arange(len(row_ids) + 1, dtype=np.int64)
    return Sequences(rows, row_ids, starts, settings.max_length, settings.pad_token_id, settings.packing)


def assign_packs(lengths: NDArray[np.int64], capacity: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assigns each row to a pack. Rows are kept whole.

    Args:
        lengths: [num_rows], tokens of each row, from 1 to `capacity`.
        capacity: tokens per pack, at most.
        seed: decides which of several rows of the same length go together.

    Returns:
        row_ids: [num_rows], the rows ordered by pack.
        starts: [num_packs + 1], where packs begin in `row_ids`, and num_rows at the end.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]

    open_packs: list[list[int]] = [[] for _ in range(capacity)]  # by the room that is left in them
    rooms = 0
    num_packs = 0
    packs: list[int] = []  # the pack of each row in `order`
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = open_packs[room].pop()
            if not open_packs[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, num_packs
            num_packs += 1
        packs.append(chosen)
        if left := room - length:
            open_packs[left].append(chosen)
            rooms |= 1 << left

    by_pack = np.argsort(packs, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(packs, minlength=num_packs))]).astype(np.int64)
    return order[by_pack], starts
