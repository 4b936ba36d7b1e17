"""Rows of task=distill: those that share a sequence leave room for the teacher's prompts."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.helpers.one_process import one_process

from qlora_fsdp.config.schema import DistillConfig
from qlora_fsdp.data.questions import Question
from qlora_fsdp.data.sequences import SequenceSettings
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.training.answers.answered import AnsweredStep
from qlora_fsdp.training.answers.from_teacher import FromTeacher
from qlora_fsdp.training.answers.rewarded import Answered
from qlora_fsdp.training.answers.rollouts import Completion

ROOM = 64
NUM_ROWS = 12


@pytest.mark.parametrize(("own", "teachers"), [(4, 40), (40, 4), (4, 24)])
@pytest.mark.parametrize("packing", [True, False])
def test_no_pass_has_more_tokens_than_a_sequence(own: int, teachers: int, packing: bool) -> None:
    questions = [
        Question([1] * own, "own", {}, f"rows:{number}", teacher_tokens=[2] * (teachers + number % 3))
        for number in range(NUM_ROWS)
    ]
    completions = [Completion([3] * 8, [-0.5] * 8) for _ in questions]
    answered = Answered(questions, 1, completions, rewarding=cast(Any, None), seconds=0.0)
    settings = SequenceSettings(ROOM, pad_token_id=0, packing=packing, seed=0)
    split = BatchSplit(1, NUM_ROWS, num_groups=2, num_steps=1, num_sequences=NUM_ROWS)
    model: Any = None  # rows and batches ask nothing of it
    lesson = FromTeacher(model, DistillConfig(), settings, split, 0, one_process(), deterministic=False)
    rows = lesson.rows(answered)
    of_ranks = [lesson.batches(answered, AnsweredStep.of(rows, settings, split, rank), 0) for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1])
    num_tokens = 0
    for batch in [batch for batches in of_ranks for batch in batches]:
        assert batch.taught is not None and batch.taught.asked is not None
        asked = batch.taught.asked
        assert max(batch.input_ids.shape[1], asked.input_ids.shape[1]) <= ROOM
        assert (asked.targets >= 0).sum() == (batch.targets >= 0).sum()
        num_tokens += int(asked.num_tokens.sum())
    assert num_tokens == sum(len(question.teacher_tokens) + 8 for question in questions)
