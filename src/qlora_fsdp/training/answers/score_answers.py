"""What a teacher makes of answers in the data: for each token the likeliest ones, and how likely they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.batch import collate
from qlora_fsdp.data.questions import Question
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.teacher_scores import RowScores
from qlora_fsdp.layers.divergence import likeliest
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep
from qlora_fsdp.training.answers.from_teacher import target_positions
from qlora_fsdp.training.answers.rollouts import Completion
from qlora_fsdp.training.capture.passes import place


@dataclass(frozen=True)
class _Scored:
    """The rows that a rank has scored, as it tells the others.

    Attributes:
        numbers: of the rows, [n].
        ids: of one row after another, [sum of lengths, K].
        log_probs: the same, [sum of lengths, K + 1].
        given: the same, [sum of lengths].
    """

    numbers: NDArray[np.int64]
    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    given: NDArray[np.float32]


def num_scored_tokens(teacher: AssembledModel) -> int:
    """The tokens whose probabilities are compared. Further rows of the teacher's tables stand for none."""
    return min(len(teacher.tokenizer), teacher.model.vocab_size)


class AnswerScorer:
    """Scores answers. All ranks call it together.

    Args:
        teacher: loaded, maybe in shards.
        data: how rows become sequences.
        number: how many of the likeliest tokens are kept.
        processes: all ranks take part.
    """

    def __init__(self, teacher: AssembledModel, data: DataSpec, number: int, processes: Processes) -> None:
        assert isinstance(teacher.model, DistillLM)
        self.model = teacher.model
        self.number = number
        self.processes = processes
        self.num_tokens = num_scored_tokens(teacher)
        self.layout = SequenceSettings.of(replace(data, packs_rows=teacher.spec.packs_rows), teacher.tokenizer)
        self.split = BatchSplit(1, processes.num_ranks, processes.num_ranks, 1, 1)

    @torch.no_grad()
    def score(self, questions: Sequence[Question]) -> list[RowScores]:
        """What the teacher makes of the answer of each row, in order; the same on every rank."""
        completions = []
        for question in questions:
            assert question.given is not None
            completions.append(Completion(question.given, []))
        prompts = [question.teacher_tokens for question in questions]
        rows = AnsweredRows(prompts, completions, np.ones(len(prompts), dtype=bool))
        laid = AnsweredStep.of(rows, self.layout, self.split, self.processes.rank)
        own: list[RowScores] = []
        numbers: list[int] = []
        with self.model.without_dropout():
            for indices, of_sequences in zip(laid.micro, laid.laid_rows(), strict=True):
                batch = collate(laid.sequences, indices, micro_batch_size=laid.micro_batch_size)
                batch = place(
                    replace(batch, label_positions=target_positions(batch)), self.processes.device, deterministic=False
                )
                hidden = self.model(batch, "hidden")
                head = self.model.frozen_head(self.processes.device).first(self.num_tokens)
                assert batch.label_positions is not None
                targets = batch.targets.flatten()[batch.label_positions]
                found = likeliest(hidden, head, targets, self.number).map(torch.Tensor.cpu)
                numbers += [row for ids in of_sequences for row in ids]
                own.append(RowScores(found.ids.int().numpy(), found.log_probs.numpy(), found.given.numpy()))
        free_gathered(self.model)
        return self._gather(questions, numbers, own)

    def _gather(self, questions: Sequence[Question], numbers: list[int], own: list[RowScores]) -> list[RowScores]:
        """The rows of all ranks in order, from those of this rank, some in each of `own`."""
        scored = _Scored(
            numbers=np.array(numbers, dtype=np.int64),
            ids=np.concatenate([part.ids for part in own]),
            log_probs=np.concatenate([part.log_probs for part in own]),
            given=np.concatenate([part.given for part in own]),
        )
        found: dict[int, RowScores] = {}
        for part in self.processes.gather(scored, _Scored, patiently=True):
            begin = 0
            for number in part.numbers.tolist():
                end = begin + len(questions[number].given or ())
                span = slice(begin, end)
                found[number] = RowScores(part.ids[span], part.log_probs[span], part.given[span])
                begin = end
        return [found[number] for number in range(len(questions))]
