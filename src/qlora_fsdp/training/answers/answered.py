"""Answers as rows of tokens, packed into sequences like any others, and the micro-batches of a step on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.config.schema import GrpoConfig, PolicyLoss
from qlora_fsdp.data.batch import Batch, Rewarded, collate, lay_out_values, micro_batch_indices
from qlora_fsdp.data.sequences import NO_LABELS, Indices, Sequences, SequenceSettings, make_sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.tokenize import TokenRow
from qlora_fsdp.training.answers.rollouts import Completion


@dataclass(frozen=True)
class AnsweredRows:
    """Prompts with their answers (`sequences.Rows`).

    Attributes:
        prompts: token ids of each row's prompt.
        completions: each row's answer.
        counts: which of them the loss is about.
        room: the tokens that each row takes of a sequence that is packed, [num_rows]; None: its own.
    """

    prompts: Sequence[list[int]]
    completions: Sequence[Completion]
    counts: NDArray[np.bool_]
    room: NDArray[np.int64] | None = None

    num_answers = 0
    key = ""
    labels = NO_LABELS

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        pairs = zip(self.prompts, self.completions, strict=True)
        return np.array([len(prompt) + len(answer.tokens) for prompt, answer in pairs], dtype=np.int64)

    @property
    def part_lengths(self) -> NDArray[np.int64]:
        return self.lengths[:, None]

    @cached_property
    def num_targets(self) -> NDArray[np.int32]:
        """Tokens of each answer that count, [num_rows]."""
        return np.array([len(answer.tokens) for answer in self.completions], dtype=np.int32) * self.counts

    def read(self, row: int) -> list[TokenRow]:
        prompt, answer = self.prompts[row], self.completions[row]
        tokens = np.array([*prompt, *answer.tokens], dtype=np.int32)
        return [(tokens, np.arange(len(tokens)) >= len(prompt))]

    def in_place(self, row: int, values: Sequence[float] | float) -> NDArray[np.float32]:
        """Values of an answer's tokens, or one for each of them, as values of the row's, 0 in the prompt."""
        laid = np.zeros(self.lengths[row], dtype=np.float32)
        laid[len(self.prompts[row]) :] = values
        return laid

    def drawn(self, row: int) -> NDArray[np.float32]:
        """The log-probabilities that the tokens of an answer were drawn with, in the places of the row's tokens."""
        return self.in_place(row, self.completions[row].log_probs)


def token_weights(rows: AnsweredRows, settings: GrpoConfig, max_completion_length: int) -> NDArray[np.float64]:
    """What a token of each row counts in the loss, [num_rows], where losses are divided by the number of rows.

    Args:
        rows: all of a step.
        settings: the loss, which says what it is a mean over.
        max_completion_length: tokens that an answer has room for.
    """
    num_tokens = rows.num_targets.astype(np.float64)
    match settings.loss_type:
        case PolicyLoss.grpo:
            weights = 1 / np.maximum(num_tokens, 1)
        case PolicyLoss.dr_grpo:
            weights = np.full(len(num_tokens), 1 / max_completion_length)
        case PolicyLoss.dapo | PolicyLoss.bnpo | PolicyLoss.cispo:
            weights = np.full(len(num_tokens), len(num_tokens) / max(1.0, num_tokens.sum()))
        case PolicyLoss.rloo:  # of which tokens alone tell that they count
            weights = np.ones(len(num_tokens))
    return weights * rows.counts


@dataclass(frozen=True)
class AnsweredStep:
    """The answers of a step, laid out for all ranks.

    Attributes:
        rows: prompts with answers.
        sequences: the same, packed or each by itself.
        micro: this rank's micro-batches, the sequences of each.
        micro_batch_size: sequences of a micro-batch, with those of padding.
    """

    rows: AnsweredRows
    sequences: Sequences
    micro: list[Indices]
    micro_batch_size: int

    @classmethod
    def of(cls, rows: AnsweredRows, settings: SequenceSettings, split: BatchSplit, rank: int) -> AnsweredStep:
        """Lay out the rows of a step; `split` says how ranks share sequences."""
        sequences = make_sequences(rows, np.arange(len(rows.prompts)), settings, rows.room)
        size = split.micro_batch_size
        everything = np.arange(len(sequences))
        micro = micro_batch_indices(everything, rank=rank, num_ranks=split.num_groups, micro_batch_size=size)
        return cls(rows, sequences, micro, size)

    def batches(self, advantages: NDArray[np.float64], weights: NDArray[np.float64]) -> Iterator[Batch]:
        """This rank's micro-batches, on the CPU.

        Args:
            advantages: of each row, [num_rows].
            weights: what a token of each row counts, [num_rows].
        """
        for indices, of_sequences in zip(self.micro, self.laid_rows(), strict=True):
            batch = collate(self.sequences, indices, micro_batch_size=self.micro_batch_size)
            length = batch.input_ids.shape[1]
            own = [[self.rows.in_place(row, weights[row]) for row in rows] for rows in of_sequences]
            drawn = [[self.rows.drawn(row) for row in rows] for rows in of_sequences]
            # A sequence without rows is one row of padding (`lay_out`).
            of_rows = [value for rows in of_sequences for value in ([advantages[row] for row in rows] or [0.0])]
            rewarded = Rewarded(
                advantages=torch.tensor(of_rows, dtype=torch.float32),
                weights=lay_out_values(own, length),
                sampled=lay_out_values(drawn, length),
            )
            yield replace(batch, rewarded=rewarded)

    def laid_rows(self) -> Iterator[list[list[int]]]:
        """For each of this rank's micro-batches the rows of its sequences, those of padding too, which have none."""
        for indices in self.micro:
            found = [self.sequences.row_ids_of(int(index)).tolist() for index in indices]
            yield found + [[]] * (self.micro_batch_size - len(indices))

    def row_ends(self, micro: int, length: int) -> tuple[list[int], list[int]]:
        """The rows of one of this rank's micro-batches, and where each has its last token among B x L.

        Args:
            micro: which of them.
            length: L, of its sequences.
        """
        ids: list[int] = []
        ends: list[int] = []
        for b, index in enumerate(self.micro[micro].tolist()):
            end = b * length
            for row in self.sequences.row_ids_of(index).tolist():
                end += int(self.rows.lengths[row])
                ids.append(row)
                ends.append(end - 1)
        return ids, ends

    def row_sums(self, values: Sequence[torch.Tensor]) -> dict[int, float]:
        """The sum of values over the answer of each row that this rank has.

        Args:
            values: for each micro-batch float32 [B, L], laid out as its targets.
        """
        found: dict[int, float] = {}
        for indices, laid in zip(self.micro, values, strict=True):
            for b, index in enumerate(indices.tolist()):
                begin = 0
                for row in self.sequences.row_ids_of(index).tolist():
                    end = begin + int(self.rows.lengths[row])
                    found[row] = float(laid[b, begin : end - 1].double().sum())
                    begin = end
        return found
