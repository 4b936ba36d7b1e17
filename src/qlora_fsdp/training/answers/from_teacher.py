"""Learning from a teacher: what it would have written in place of each token of an answer, and how likely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from qlora_fsdp.common.sizes import IGNORE_INDEX, LENGTH_MULTIPLE, round_up
from qlora_fsdp.config.reading.commands import read_base_fingerprint
from qlora_fsdp.config.schema import DistillConfig
from qlora_fsdp.config.settings import show
from qlora_fsdp.data.batch import Batch, Taught, collate, lay_out
from qlora_fsdp.data.questions import Question
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.data.teacher_scores import TeacherScores, join_scores
from qlora_fsdp.model.adapters.other_adapter import OtherAdapter
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.model.assemble import AssembledModel, check_fingerprint
from qlora_fsdp.model.tasks.distill_lm import DistillLM
from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.answers.answered import AnsweredRows, AnsweredStep
from qlora_fsdp.training.answers.rewarded import Answered
from qlora_fsdp.training.answers.rollouts import Completion
from qlora_fsdp.training.capture.passes import place

SETTING = "distill.teacher_adapter"


def put_teacher_in(assembled: AssembledModel, settings: DistillConfig, base: str, processes: Processes) -> None:
    """Give the model the adapter that teaches it, if one does. Collective.

    Args:
        assembled: the model, loaded.
        settings: which adapter.
        base: what the settings call the base.
        processes: all ranks take part.

    Raises:
        AdapterError: the adapter was trained on other weights, has NaN or infinite values, or adapts what has no
            adapter here; the same on every rank.
    """
    model = assembled.model
    assert isinstance(model, DistillLM)
    if settings.teacher_adapter is None:
        return
    saved = SavedAdapter(Path(settings.teacher_adapter).expanduser(), SETTING)
    check_fingerprint(
        assembled,
        read_base_fingerprint(settings.teacher_adapter),
        processes,
        base=show("model.path", base),
        adapter=str(saved),
        fix=f". A teacher is an adapter of the same base: train it on that, or leave {SETTING} out.",
    )
    teacher = OtherAdapter(saved, model.model, processes.device)
    saved.check_values(processes)
    model.teacher = teacher


@dataclass(frozen=True)
class FromTeacher:
    """What task=distill learns from the answers of a step (`answer_queue.Lesson`). All ranks call it together.

    Attributes:
        model: sharded and loaded, with its teacher.
        settings: the teacher and the loss.
        layout: how answers become sequences.
        split: how ranks share sequences.
        seed: says which steps are on answers of the data.
        processes: all ranks take part.
        deterministic: whether the run repeats to the bit.
        scores: what a teacher that takes no part makes of the answers in the data; None: a teacher takes part.
    """

    model: DistillLM
    settings: DistillConfig
    layout: SequenceSettings
    split: BatchSplit
    seed: int
    processes: Processes
    deterministic: bool
    scores: TeacherScores | None = None

    num_iterations = 1

    def given(self, questions: Sequence[Question], step: int) -> list[Completion] | None:
        """In a part of the steps, 1 - `lmbda` of them, the answers of the data."""
        if np.random.default_rng([self.seed, step]).random() < self.settings.lmbda:
            return None
        return self._given(questions)

    def given_to_evaluate(self, questions: Sequence[Question]) -> list[Completion] | None:
        """The answers of the data, where the teacher knows of these alone."""
        return None if self.scores is None else self._given(questions)

    def _given(self, questions: Sequence[Question]) -> list[Completion]:
        found = []
        for question in questions:
            assert question.given is not None
            found.append(Completion(question.given, [float("nan")] * len(question.given)))
        return found

    def rows(self, answered: Answered) -> AnsweredRows:
        """The answers as rows, all of which count, with room in a packed sequence for the teacher's prompts too."""
        prompts = [question.tokens for question in answered.asked]
        own = AnsweredRows(prompts, answered.completions, np.ones(len(prompts), dtype=bool))
        if self.scores is not None:
            return own
        return replace(own, room=np.maximum(own.lengths, _teachers(answered).lengths))

    def num_targets(self, rows: AnsweredRows) -> int:
        """Losses are divided by the number of tokens."""
        return int(rows.num_targets.sum())

    def batches(self, answered: Answered, laid: AnsweredStep, step: int) -> list[Batch]:
        """Micro-batches with the teacher's prompts before the same answers."""
        return list(self._batches(answered, laid))

    def _batches(self, answered: Answered, laid: AnsweredStep) -> Iterator[Batch]:
        rows = laid.rows
        asked = answered.asked
        teachers = _teachers(answered)
        has_own = self.scores is None and teachers.prompts != rows.prompts
        for indices, of_sequences in zip(laid.micro, laid.laid_rows(), strict=True):
            batch = collate(laid.sequences, indices, micro_batch_size=laid.micro_batch_size)
            sampled = [value for ids in of_sequences for row in ids for value in rows.completions[row].log_probs]
            taught = Taught(
                positions=target_positions(batch),
                sampled=torch.tensor(sampled, dtype=torch.float32),
                asked=self._lay_out(teachers, of_sequences) if has_own else None,
            )
            if self.scores is not None:
                top = join_scores([self.scores.of(asked[row]) for ids in of_sequences for row in ids])
                taught = replace(taught, top=top)
            yield replace(batch, label_positions=taught.positions, taught=taught)

    def _lay_out(self, rows: AnsweredRows, of_sequences: Sequence[Sequence[int]]) -> Batch:
        """The teacher's rows, those of each sequence together: at most max_length tokens, as `rows` made room."""
        longest = max(sum(int(rows.lengths[row]) for row in ids) for ids in of_sequences)
        length = round_up(max(1, longest), LENGTH_MULTIPLE)
        read = [[rows.read(row)[0] for row in ids] for ids in of_sequences]
        batch = lay_out(read, length, self.layout.pad_token_id)
        batch.position_ids.clamp_(max=self.layout.max_length - 1)
        return replace(batch, label_positions=target_positions(batch))

    @torch.no_grad()
    def evaluate(self, answered: Answered) -> dict[str, float]:
        """The divergence of a token of answers as `loss`, and the model's other figures; the same on every rank."""
        rows = self.rows(answered)
        laid = AnsweredStep.of(rows, self.layout, self.split, self.processes.rank)
        self.model.forget_outputs()
        total = 0.0
        with self.model.without_dropout():
            for batch in self._batches(answered, laid):
                placed = place(batch, self.processes.device, self.deterministic)
                total += float(self.model(self.model.with_reference(placed)))
        free_gathered(self.model)
        [loss] = self.processes.sum([total])
        return {"loss": loss / self.num_targets(rows), **self.model.take_metrics(self.processes)}


def _teachers(answered: Answered) -> AnsweredRows:
    """The same answers after the teacher's prompts."""
    prompts = [question.teacher_tokens for question in answered.asked]
    return AnsweredRows(prompts, answered.completions, np.ones(len(prompts), dtype=bool))


def target_positions(batch: Batch) -> torch.Tensor:
    """Where the T tokens of answers are predicted among the B x L tokens of a batch: int64 [T]."""
    return (batch.targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
