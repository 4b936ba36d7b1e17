"""Stages 2 to 4 for preferences: rows with a prompt and answers, checked and tokenized as rows of tokens.

A pair becomes two rows of tokens, the chosen answer's and the rejected one's after it; if one of them can't be used,
neither is. `read_answers` has the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn
from qlora_fsdp.data.cut import WITH_BEFORE
from qlora_fsdp.data.format import format_row
from qlora_fsdp.data.read_answers import read_answers, read_margin
from qlora_fsdp.data.row import NO_TARGET, SAME_ANSWERS, BadRow, parse_row
from qlora_fsdp.data.tokenize import COLUMNS, Columns, RowTokenizer, TokenRow, add_row


@dataclass(frozen=True)
class PreferenceRowTokenizer:
    """Checks, formats and tokenizes batches of raw rows. Answers are not yet cut.

    Attributes:
        tokenizer: the model's.
        is_paired: whether each two rows of tokens are a pair; else each has a label.
        max_length: of a prompt with an answer that has more tokens, a beginning of more than these is tokenized.
        columns: data.columns.
        has_margin: whether pairs get margins for their rewards.
    """

    tokenizer: PreTrainedTokenizerBase
    is_paired: bool
    max_length: int
    columns: Mapping[str, str]
    has_margin: bool

    def __call__(self, batch: Columns) -> Columns:
        """Maps columns `place` and `row` to COLUMNS. A bad row stays, empty."""
        out: Columns = {name: [] for name in COLUMNS}
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                for number, (row, detail, labels) in enumerate(self._tokenize(raw)):
                    add_row(out, place, "", detail, row, labels, WITH_BEFORE if number else 0)
            except BadRow as bad:
                add_row(out, place, bad.kind, bad.detail)
        return out

    def _tokenize(self, raw: bytes) -> list[tuple[TokenRow, str, list[float]]]:
        """Tokens, detail and labels of each answer of a row.

        Raises:
            BadRow: the row can't be used.
        """
        inner = RowTokenizer(self.tokenizer, DataFormat.auto, LossOn.completion, self.max_length, BadRows.truncate)
        row = parse_row(raw)
        answers = read_answers(row, self.is_paired, self.columns)
        margin = read_margin(row, self.columns) if self.has_margin else None
        formatted = [
            row
            for answer in answers
            for row in format_row(answer.form, answer.fields, LossOn.completion, self.tokenizer)
        ]
        found = list(inner.encode(formatted))
        if not all(len(tokens) for (tokens, _), _ in found):
            raise BadRow(NO_TARGET)
        pairs = zip(found[::2], found[1::2], strict=True) if self.is_paired else ()
        for ((chosen, is_target), _), ((rejected, _), _) in pairs:
            if is_target.any() and np.array_equal(chosen, rejected):
                raise BadRow(SAME_ANSWERS)
        labels = [margin if self.has_margin else answer.label for answer in answers]
        return [
            (tokens, detail, [] if label is None else [float(label)])
            for (tokens, detail), label in zip(found, labels, strict=True)
        ]
