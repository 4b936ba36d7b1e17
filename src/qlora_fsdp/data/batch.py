"""Stage 7, batch: which sequences each rank computes, and their tensors.

The whole data is put in order first, and divided among ranks and micro-batches afterwards. So the same data gives the
same global batches at any number of ranks and any micro-batch size.

With `distributed.context_parallel` a group of ranks has the same sequences, and each rank a slice of every one. It is
cut when all is laid out: tokens keep the positions and the targets that they have in the whole sequence, so that the
target of a slice's last token is the first token of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.common.sizes import IGNORE_INDEX, round_length, round_up
from qlora_fsdp.data.answers import Judged, Paired
from qlora_fsdp.data.sequences import Indices, Sequences, TrainingData
from qlora_fsdp.data.tokenize import TokenRow

if TYPE_CHECKING:  # the package of layers imports bitsandbytes, which a process that is forked must not have
    from qlora_fsdp.layers.divergence import TopTeacher


@dataclass(frozen=True)
class Rewarded:
    """What a loss knows of answers that the model has written itself, laid out as the targets of a batch are.

    Attributes:
        advantages: float32 [num_rows], how much better each row's answer is than others to its prompt.
        weights: float32 [B, L], what each token counts in the loss; 0 where there is no target.
        sampled: float32 [B, L], the log-probability that each token was drawn with.
        old: float32 [B, L], the log-probabilities before the first step on these answers; None: they are those of the
            pass itself.
        reference: float32 [B, L], those under the model before training; None: no loss asks for them.
    """

    advantages: torch.Tensor
    weights: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Rewarded:
        """The same with what a function makes of each tensor."""
        made = {name: None if value is None else function(value) for name, value in vars(self).items()}
        return Rewarded(**cast(dict[str, Any], made))


@dataclass(frozen=True)
class Taught:
    """What a loss knows of answers whose T tokens a teacher scores.

    Attributes:
        positions: int64 [T], where each token is predicted among the B x L tokens of the batch.
        sampled: float32 [T], the log-probability that each was drawn with; NaN of answers from the data.
        asked: the same answers after the teacher's prompts, with `label_positions` [T], of the same tokens in the same
            order; None: the teacher's prompts are those of the batch.
        hidden: [T, D], what the head gets of the teacher for each; None: not computed yet.
        top: what a file has of the teacher for each, in place of a pass; None: there is a pass.
    """

    positions: torch.Tensor
    sampled: torch.Tensor
    asked: Batch | None = None
    hidden: torch.Tensor | None = None
    top: TopTeacher | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Taught:
        """The same with what a function makes of each tensor."""
        asked = None if self.asked is None else self.asked.map(function)
        hidden = None if self.hidden is None else function(self.hidden)
        top = None if self.top is None else self.top.map(function)
        return Taught(function(self.positions), function(self.sampled), asked, hidden, top)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of B sequences of L tokens, or a slice of each, with L tokens in it and the starts of all rows.

    Attributes:
        input_ids: int64 [B, L].
        targets: int64 [B, L], the token that follows in the same row, or -100 where there is no loss.
        position_ids: int64 [B, L], from 0 in each row. Padding at the end of a sequence belongs to its last row.
        sequence_starts: int32 [num_rows + 1], where rows begin in the flattened B x L tokens, and B x L at the end; of
            slices where they begin in the whole sequences.
        max_row_length: number of tokens of the longest row, with the padding after it.
        labels: float32 [num_labels, numbers per label]; None where tokens are predicted.
        label_positions: int64 [num_labels], what the labels belong to: their index among the B sequences, or among the
            B x L tokens if tokens have labels.
        is_label: bool [num_labels], of a batch with room for more labels than it has: which it has; None: all.
        num_tokens: int64 [B], tokens of each sequence without padding.
        num_answers: how many rows, from the first on, are answers to compare: the chosen and the rejected one
            of each pair side by side, or one with a label each; the rows after them are padding. 0: none are compared.
        is_answer: bool [num_answers], of a batch with room for more answers than it has: which it has; None: all.
        is_good: bool [num_answers], the labels of answers; None of pairs.
        mismatched: for answers with labels, their prompts with other answers, row by row; else None.
        margins: float32 [num_pairs], by which the rewards of a pair are to differ; None where none are learned.
        reference: float32 [num_pairs, 2], the log-probabilities of chosen and rejected answers under the model before
            training; or [num_answers, 2], those of answers and of the mismatched ones. None: each step computes them,
            or the loss needs none.
        num_slices: slices of a sequence; 1: sequences are whole.
        rewarded: what is known of answers that are rewarded; None of other rows.
        taught: what is known of answers that a teacher scores; None of other rows.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    sequence_starts: torch.Tensor
    max_row_length: int
    _: KW_ONLY
    labels: torch.Tensor | None = None
    label_positions: torch.Tensor | None = None
    is_label: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    num_answers: int = 0
    is_answer: torch.Tensor | None = None
    is_good: torch.Tensor | None = None
    mismatched: Batch | None = None
    margins: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    num_slices: int = 1
    rewarded: Rewarded | None = None
    taught: Taught | None = None

    @property
    def whole_length(self) -> int:
        """Tokens of a whole sequence."""
        return self.input_ids.shape[1] * self.num_slices

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 for tokens, 0 for padding, int64 [B, L]. Of a sequence of padding alone all are 1: a row of 0 gave NaN."""
        assert self.num_tokens is not None
        length = self.input_ids.shape[1]
        num_tokens = torch.where(self.num_tokens > 0, self.num_tokens, length)
        return (torch.arange(length, device=num_tokens.device) < num_tokens[:, None]).long()

    def to(self, device: torch.device | str) -> Batch:
        """Copies the tensors to `device`. The host does not wait for the copy if they are pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copies the tensors to page-locked memory."""
        return self.map(torch.Tensor.pin_memory)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with what a function makes of each tensor."""
        tensors: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        if self.rewarded is not None:
            tensors["rewarded"] = self.rewarded.map(function)
        if self.mismatched is not None:
            tensors["mismatched"] = self.mismatched.map(function)
        if self.taught is not None:
            tensors["taught"] = self.taught.map(function)
        return replace(self, **tensors)

    def slice(self, index: int, num_slices: int) -> Batch:
        """One of `num_slices` equal slices of a whole micro-batch whose tokens are predicted."""
        length = self.input_ids.shape[1] // num_slices
        part = slice(index * length, (index + 1) * length)
        own = {name: getattr(self, name)[:, part].contiguous() for name in ("input_ids", "targets", "position_ids")}
        return replace(self, **own, num_slices=num_slices)


def micro_batch_indices(global_indices: Indices, *, rank: int, num_ranks: int, micro_batch_size: int) -> list[Indices]:
    """The micro-batches of one rank, or of one group of ranks, of a global batch.

    Micro-batch m of rank r is `global_indices[(m * num_ranks + r) * micro_batch_size :][:micro_batch_size]`. All ranks
    have the same number of micro-batches. If the global batch is short, some of the last ones are short or empty.
    """
    num_micro_batches = -(-len(global_indices) // (num_ranks * micro_batch_size))
    starts = [(micro * num_ranks + rank) * micro_batch_size for micro in range(num_micro_batches)]
    return [global_indices[start : start + micro_batch_size] for start in starts]


def collate(sequences: TrainingData, indices: Indices, *, micro_batch_size: int, num_slices: int = 1) -> Batch:
    """Makes the tensors of a micro-batch, on the CPU.

    With packing, L is max_length, so that shapes never change. Otherwise it is the length of the longest row in the
    micro-batch, rounded up to one of a few (`round_length`).

    Args:
        sequences: the data.
        indices: the sequences of the micro-batch. If they are fewer than B, the rest is padding without targets.
        micro_batch_size: B.
        num_slices: a number that has to divide L: there may be more padding for it.
    """
    assert len(indices) <= micro_batch_size
    if sequences.num_answers:
        assert isinstance(sequences, Sequences)
        return _collate_answers(sequences, indices, micro_batch_size)
    rows = [sequences.rows_of(int(index)) for index in indices] + [[]] * (micro_batch_size - len(indices))
    longest = int(sequences.lengths_of(indices).max(initial=1))
    length = padded_length(sequences, longest)
    batch = lay_out(rows, round_up(length, num_slices), sequences.pad_token_id)
    batch.position_ids.clamp_(max=length - 1)  # the model may know no more of them
    return _with_labels(batch, rows, sequences.labels_of(indices)) if sequences.has_labels else batch


def lay_out(rows: Sequence[Sequence[TokenRow]], length: int, pad_token_id: int) -> Batch:
    """Lays out the rows of each sequence one after another, with padding at the end.

    Padding belongs to the last row before it, with positions that go on. The row's tokens come first and see nothing of
    it. As rows of its own, padding would mark every padded sequence as packed, which some models can't compute. And a
    row of padding alone has hidden states of zeros if its embedding is zero: Gemma 3n divides by their size in
    backward. So a sequence without rows is filled with another token.

    Args:
        rows: for each of B sequences its rows: tokens, and which of them are targets.
        length: L, at least the tokens of each sequence.
        pad_token_id: the padding.
    """
    shape = (len(rows), length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    targets = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    positions = np.arange(length)
    row_starts = []
    for b, sequence in enumerate(rows):
        position_ids[b] = positions
        if not sequence:
            input_ids[b] = 1 if pad_token_id == 0 else 0
        begin = 0
        row_starts.append(b * length)
        for tokens, is_target in sequence:
            end = begin + len(tokens)
            input_ids[b, begin:end] = tokens
            targets[b, begin : end - 1] = np.where(is_target[1:], tokens[1:], IGNORE_INDEX)
            if begin:
                position_ids[b, begin:] = positions[: length - begin]
                row_starts.append(b * length + begin)
            begin = end
    row_starts.append(len(rows) * length)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        sequence_starts=torch.tensor(row_starts, dtype=torch.int32),
        max_row_length=int(np.diff(row_starts).max()),
        num_tokens=torch.tensor([sum(len(tokens) for tokens, _ in sequence) for sequence in rows], dtype=torch.int64),
    )


def lay_out_values(values: Sequence[Sequence[NDArray[np.float32]]], length: int) -> torch.Tensor:
    """Lays out a number for each token of rows as `lay_out` does their targets: float32 [B, length], 0 elsewhere.

    Args:
        values: for each of B sequences those of its rows, [tokens of the row]. A row's first token is no target.
        length: L.
    """
    laid = np.zeros((len(values), length), dtype=np.float32)
    for b, rows in enumerate(values):
        begin = 0
        for row in rows:
            laid[b, begin : begin + len(row) - 1] = row[1:]
            begin += len(row)
    return torch.from_numpy(laid)


def _collate_answers(sequences: Sequences, indices: Indices, micro_batch_size: int) -> Batch:
    """The micro-batch of a preference. Without packing, every answer of a pair is a sequence of its own."""
    rows = [row for index in indices for row in sequences.row_ids_of(int(index)).tolist()]
    batch = _lay_out_answers(sequences, indices, micro_batch_size, sequences.rows.read)
    found: dict[str, Any] = {"num_answers": len(rows) * sequences.num_answers}
    if sequences.num_answers == 1:
        judged = cast(Judged, sequences.rows)
        found["is_good"] = torch.from_numpy(judged.is_good[rows])
        mismatched = _lay_out_answers(sequences, indices, micro_batch_size, lambda row: [judged.read_mismatched(row)])
        found["mismatched"] = replace(mismatched, num_answers=len(rows))
    else:
        margins = cast(Paired, sequences.rows).margins
        if margins is not None:
            found["margins"] = torch.from_numpy(margins[rows])
    if sequences.reference is not None:
        found["reference"] = torch.from_numpy(sequences.reference[rows])
    return replace(batch, **found)


def _lay_out_answers(
    sequences: Sequences, indices: Indices, micro_batch_size: int, read: Callable[[int], list[TokenRow]]
) -> Batch:
    """The rows of tokens that `read` gives for each row of the sequences."""
    rows = [[part for row in sequences.row_ids_of(int(i)).tolist() for part in read(row)] for i in indices]
    if sequences.is_packed:
        padded = rows + [[]] * (micro_batch_size - len(rows))
        return lay_out(padded, sequences.max_length, sequences.pad_token_id)
    alone = [[part] for parts in rows for part in parts]
    longest = max((len(tokens) for [(tokens, _)] in alone), default=1)
    length = round_length(longest, sequences.max_length // sequences.num_answers)
    padded = alone + [[]] * (micro_batch_size * sequences.num_answers - len(alone))
    return lay_out(padded, length, sequences.pad_token_id)


def _with_labels(batch: Batch, rows: Sequence[Sequence[TokenRow]], labels: NDArray[np.float32]) -> Batch:
    """The batch of a classifier: its rows, one a sequence, have labels and no targets."""
    length = batch.input_ids.shape[1]
    positions: list[int] = []
    for b, ((_, is_labelled),) in enumerate(row for row in rows if row):
        positions += (b * length + np.flatnonzero(is_labelled)).tolist() if is_labelled.any() else [b]
    return replace(
        batch,
        targets=torch.full_like(batch.targets, IGNORE_INDEX),
        labels=torch.from_numpy(labels),
        label_positions=torch.tensor(positions, dtype=torch.int64),
    )


def padded_length(sequences: TrainingData, longest: int) -> int:
    """Tokens of a sequence whose longest row has `longest`, with the padding after it."""
    if sequences.is_packed:
        return sequences.max_length
    return round_length(longest, sequences.max_length)
