"""Log-likelihoods of many short texts, by a few large calls of the model instead of many small ones.

Texts are sorted by length and padded at their ends, where no other token sees it, so that a call has thousands of
tokens and little padding. Answers to one question, as tasks of multiple choice have them, follow it in one row, which
is read once; an answer sees the question and itself. The head computes logits of the tokens that are asked for alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.decoding.slot_cache import attending
from qlora_fsdp.layers.attention.slots import Step, running
from qlora_fsdp.layers.decode_linear import DecodeLayers
from qlora_fsdp.model.tasks.causal_lm import CausalLM
from qlora_fsdp.sharding.by_rows import ByRows

CALL_TOKENS = 16_384  # tokens of one call, padding included
SHARED_CALL_TOKENS = 4096  # the same where ranks send one another the results of all layers
ROW_TOKENS = 4096  # of a question and its answers, at most, unless it is one text
HEAD_TOKENS = 1024  # tokens whose logits exist at the same time


class Text(NamedTuple):
    """A text whose last tokens are asked for.

    Attributes:
        tokens: what the model reads, all but the last of the text.
        targets: the text's last tokens; the first of them follows `tokens[-len(targets)]`.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def question(self) -> tuple[int, ...]:
        """The tokens before the targets."""
        return self.tokens[: len(self.tokens) - len(self.targets) + 1]

    @property
    def answer(self) -> tuple[int, ...]:
        """The targets that are read, all but the last."""
        return self.tokens[len(self.tokens) - len(self.targets) + 1 :]


class QuestionGroup(NamedTuple):
    """A question, and the answers that follow it.

    Attributes:
        question: tokens.
        answers: the numbers of the texts that have each answer; their last targets, which are not read, may differ.
    """

    question: tuple[int, ...]
    answers: dict[tuple[int, ...], list[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens that are read."""
        return len(self.question) + sum(map(len, self.answers))

    @property
    def num_texts(self) -> int:
        """Texts of all answers."""
        return sum(map(len, self.answers.values()))


class Likelihood(NamedTuple):
    """The sum of the log-probabilities of a text's targets, and whether each target is the likeliest token."""

    log_probability: float
    is_greedy: bool


class Scorer:
    """Computes log-likelihoods on one device, or on several ranks together.

    Args:
        model: with weights, in evaluation mode, of a kind that `why_not_in_slots` has nothing against.
        device: where it is.
        max_rows: rows of one call, at most.
        by_rows: what computes a sharded model; None: it is whole here. Its ranks ask for the same likelihoods.
    """

    def __init__(
        self, model: CausalLM, device: torch.device, max_rows: int | None = None, by_rows: ByRows | None = None
    ) -> None:
        self.model = model
        self.device = device
        self.max_rows = max_rows
        self.layers = by_rows or DecodeLayers(model)
        self.call_tokens = CALL_TOKENS if by_rows is None else SHARED_CALL_TOKENS

    @torch.no_grad()
    def score(self, texts: Sequence[Text], on_done: Callable[[int], Any] = lambda number: None) -> list[Likelihood]:
        """The likelihoods of all texts, in their order. `on_done` gets the number of texts done since its last call.

        Raises:
            DataError: the tokens that are read of a text leave no question before its targets.
        """
        beyond = next((text for text in texts if len(text.targets) > len(text.tokens)), None)
        if beyond is not None:
            raise DataError(
                f"An answer has {len(beyond.targets):,} tokens, and {len(beyond.tokens):,} are read of it and its "
                "question. Set max_length higher, or leave its task out."
            )
        found: dict[int, Likelihood] = {}
        before: tuple[list[int], Tensor, Tensor] | None = None

        def fetch() -> None:
            if before is not None:
                call, sums, are_greedy = before
                found.update(zip(call, map(Likelihood, sums.tolist(), are_greedy.tolist()), strict=True))
                on_done(len(call))

        with self.layers.in_use(), attending(self.model.base):
            for rows in self._split(group_by_question(texts)):
                numbers = [number for row in rows for of_answer in row.answers.values() for number in of_answer]
                queued = (numbers, *self._call(rows, texts))
                fetch()  # while the device computes what was queued
                before = queued
            fetch()
        return [found[number] for number in range(len(texts))]

    def _split(self, rows: Sequence[QuestionGroup]) -> Iterator[list[QuestionGroup]]:
        """Calls of rows of about the same length, the longest first."""
        call: list[QuestionGroup] = []
        for row in sorted(rows, key=lambda row: row.num_tokens, reverse=True):
            is_full = bool(call) and (len(call) + 1) * call[0].num_tokens > self.call_tokens
            if is_full or len(call) == self.max_rows:
                yield call
                call = []
            call.append(row)
        if call:
            yield call

    def _call(self, rows: Sequence[QuestionGroup], texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Sums of log-probabilities, float32 [texts]; whether all targets are the likeliest tokens, bool [texts].

        Texts are those of the rows, one row after another.
        """
        laid_out, places = _lay_out(rows, texts)
        tokens, branches, positions = laid_out.to(self.device).unbind(0)
        numbers, in_rows, in_columns, targets = places.to(self.device).unbind(1)
        step = Step()
        if any(len(row.answers) > 1 for row in rows):
            step = Step(branches=branches, places=positions)
        base: Any = self.model.base
        with running(step):
            inputs = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
            if self.model.transform is not None:
                outputs = base.get_decoder()(**inputs).last_hidden_state
            else:
                outputs = base(**inputs).logits
        chosen = outputs[in_rows, in_columns]
        log_probabilities: list[Tensor] = []
        are_missed: list[Tensor] = []
        for part, target in zip(chosen.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
            logits = self._logits(part).float()
            log_probabilities.append(logits.log_softmax(-1).gather(1, target[:, None])[:, 0])
            are_missed.append((logits.argmax(-1) != target).float())
        zeros = torch.zeros(sum(row.num_texts for row in rows), device=self.device)
        sums = zeros.index_add(0, numbers, torch.cat(log_probabilities))
        num_missed = zeros.index_add(0, numbers, torch.cat(are_missed))
        return sums, num_missed == 0

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.model.transform is None:
            return hidden
        base: Any = self.model.base
        return self.model.transform(base.get_output_embeddings()(hidden[None])[0])


def group_by_question(texts: Sequence[Text]) -> list[QuestionGroup]:
    """Put texts with the same question into one row, if it is longer than their answers: else reading it is cheap."""
    rows: list[QuestionGroup] = []
    open_rows: dict[tuple[int, ...], QuestionGroup] = {}
    for number, text in enumerate(texts):
        question = text.question
        answer = text.answer
        is_short = len(answer) < len(question)
        row = open_rows.get(question) if is_short else None
        is_full = row is not None and answer not in row.answers and row.num_tokens + len(answer) > ROW_TOKENS
        if row is None or is_full:
            row = QuestionGroup(question, {})
            rows.append(row)
        if is_short:
            open_rows[question] = row
        row.answers.setdefault(answer, []).append(number)
    return rows


def _lay_out(rows: Sequence[QuestionGroup], texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Tokens, branches and positions, int64 [3, rows, longest]; and where the targets are, int64 [targets, 4].

    The latter are the number of a target's text among those of the rows, its row, the column of the token before it,
    and the target itself.
    """
    laid_out = torch.zeros(3, len(rows), max(row.num_tokens for row in rows), dtype=torch.int64)
    tokens, branches, positions = laid_out
    branches.fill_(-1)  # padding is a branch that nobody sees
    places: list[tuple[int, int, int, int]] = []
    num_texts = 0
    for index, row in enumerate(rows):
        num_asked = len(row.question)
        tokens[index, :num_asked] = torch.tensor(row.question)
        branches[index, :num_asked] = 0
        positions[index, :num_asked] = torch.arange(num_asked)
        start = num_asked
        for branch, (answer, numbers) in enumerate(row.answers.items(), start=1):
            end = start + len(answer)
            tokens[index, start:end] = torch.tensor(answer)
            branches[index, start:end] = branch
            positions[index, start:end] = torch.arange(num_asked, num_asked + len(answer))
            columns = [num_asked - 1, *range(start, end)]
            for number in numbers:
                targets = texts[number].targets
                places += [(num_texts, index, column, t) for column, t in zip(columns, targets, strict=True)]
                num_texts += 1
            start = end
    return laid_out, torch.tensor(places)
