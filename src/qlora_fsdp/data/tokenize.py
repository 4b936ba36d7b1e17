"""Stage 4, tokenize: raw rows → token ids and, for each token, whether it is trained on. Runs in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn
from qlora_fsdp.data.format import FormattedRow, Span, format_row
from qlora_fsdp.data.row import NO_TARGET, TOO_LONG, BadRow, check_row

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]

FEATURES = datasets.Features(
    {
        "place": datasets.Value("string"),
        "problem": datasets.Value("string"),  # a kind of data.check, or empty
        "detail": datasets.Value("string"),
        "tokens": datasets.List(datasets.Value("int32")),  # empty: the row is left out
        "is_target": datasets.List(datasets.Value("bool")),
        "labels": datasets.List(datasets.Value("float32")),  # of a row, or of its targets; see data.labels
    }
)


@dataclass(frozen=True)
class RowTokenizer:
    """Checks, formats and tokenizes batches of raw rows; the function of `datasets.map`.

    The begin token, where the tokenizer adds one by itself, and the end token stand exactly once around what is no
    chat; of a chat, the template decides.
    """

    tokenizer: PreTrainedTokenizerBase
    data_format: DataFormat
    loss_on: LossOn
    max_length: int
    bad_rows: BadRows

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Maps columns `place` and `row` to those of FEATURES: a row may become several, and a bad one stays, empty."""
        out: dict[str, list[Any]] = {name: [] for name in FEATURES}

        def add(place: str, problem: str, detail: str, tokens: Tokens, is_target: Mask) -> None:
            for name, value in zip(FEATURES, (place, problem, detail, tokens, is_target, []), strict=True):
                out[name].append(value)

        formatted: list[tuple[str, FormattedRow]] = []
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                form, fields = check_row(raw, self.data_format)
                formatted.append((place, format_row(form, fields, self.loss_on, self.tokenizer)))
            except BadRow as bad:
                add(place, bad.kind, bad.detail, *_NOTHING)

        for (place, row), (tokens, is_target) in zip(formatted, self._encode([r for _, r in formatted]), strict=True):
            problem, detail = "", ""
            if len(tokens) > self.max_length:
                problem, detail = TOO_LONG, f"{len(tokens)} tokens"
                if self.bad_rows is not BadRows.truncate:
                    add(place, problem, detail, *_NOTHING)
                    continue
            num_pieces = 0
            for piece, piece_target in self._cut(tokens, is_target, row.may_split):
                if piece_target.any():
                    add(place, problem, detail, piece, piece_target)
                    problem, detail = "", ""  # count a row once, not each of its pieces
                    num_pieces += 1
            if not num_pieces:
                add(place, NO_TARGET, f"within {self.max_length} tokens" if problem else "", *_NOTHING)
        return out

    def _encode(self, rows: list[FormattedRow]) -> Iterator[tuple[Tokens, Mask]]:
        if not rows:
            return
        encoded = self.tokenizer(
            [row.text for row in rows],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        bos, eos = self._bos_token_id(), self.tokenizer.eos_token_id
        for row, ids, offsets in zip(rows, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            tokens = np.array(ids, dtype=np.int32)
            is_target = _overlaps(np.array(offsets, dtype=np.int64).reshape(-1, 2), row.spans)
            if not row.is_chat and bos is not None and (len(tokens) == 0 or tokens[0] != bos):
                tokens, is_target = np.insert(tokens, 0, bos), np.insert(is_target, 0, False)
            if not row.is_chat and eos is not None and (len(tokens) == 0 or tokens[-1] != eos):
                tokens, is_target = np.append(tokens, np.int32(eos)), np.append(is_target, True)
            yield tokens, is_target

    def _bos_token_id(self) -> int | None:
        bos: int | None = self.tokenizer.bos_token_id
        return bos if bos is not None and self.tokenizer("a")["input_ids"][0] == bos else None

    def _cut(self, tokens: Tokens, is_target: Mask, may_split: bool) -> Iterator[tuple[Tokens, Mask]]:
        end = len(tokens) if may_split else self.max_length
        for start in range(0, end, self.max_length):
            piece = slice(start, start + self.max_length)
            piece_target = is_target[piece].copy()
            piece_target[:1] = False  # nothing stands before the first token to predict it from
            yield tokens[piece], piece_target


def _overlaps(offsets: NDArray[np.int64], spans: tuple[Span, ...]) -> Mask:
    """Which tokens hold a character of a span. offsets: [num_tokens, 2], characters."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    is_target = np.zeros(len(offsets), dtype=bool)
    for span_start, span_end in spans:
        is_target |= (starts < span_end) & (ends > span_start)
    return is_target


_NOTHING: tuple[Tokens, Mask] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool))
