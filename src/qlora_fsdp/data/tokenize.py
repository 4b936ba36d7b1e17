"""Stage 4, tokenize: raw rows → token ids and, for each token, whether it is trained on. Runs in worker processes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn
from qlora_fsdp.data.chat_template import Span
from qlora_fsdp.data.format import FormattedRow, format_row
from qlora_fsdp.data.row import NO_TARGET, TOO_LONG, BadRow, check_row
from qlora_fsdp.data.tokenizer import encode

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]
TokenRow = tuple[Tokens, Mask]  # a row of tokens, and which of them are trained on

FEATURES = datasets.Features(
    {
        "place": datasets.Value("string"),
        "problem": datasets.Value("string"),  # a kind of data.row, or empty
        "detail": datasets.Value("string"),
        "tokens": datasets.List(datasets.Value("int32")),  # empty: the row is left out
        "is_target": datasets.List(datasets.Value("bool")),
        "labels": datasets.List(datasets.Value("float32")),  # of a row, or of its targets; see data.labels
    }
)
# Of a text with more characters than LONG_TEXT, and than LONG_TOKEN for each token that may be kept, a beginning alone
# is tokenized.
LONG_TEXT = 2**17
LONG_TOKEN = 16


@dataclass(frozen=True)
class RowTokenizer:
    """Checks, formats and tokenizes batches of raw rows; the function of `datasets.map`.

    The end token stands exactly once behind what is no chat, and so does the begin token before it, if the tokenizer
    adds one by itself. In a chat the template decides.
    """

    tokenizer: PreTrainedTokenizerBase
    data_format: DataFormat
    loss_on: LossOn
    max_length: int
    bad_rows: BadRows
    columns: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Maps columns `place` and `row` to those of FEATURES. A row may become several; a bad one stays, empty."""
        out: dict[str, list[Any]] = {name: [] for name in FEATURES}

        def add(place: str, problem: str, detail: str, tokens: Tokens, is_target: Mask) -> None:
            for name, value in zip(FEATURES, (place, problem, detail, tokens, is_target, []), strict=True):
                out[name].append(value)

        formatted: list[tuple[str, FormattedRow]] = []
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                form, fields = check_row(raw, self.data_format, self.columns)
                formatted.append((place, format_row(form, fields, self.loss_on, self.tokenizer)))
            except BadRow as bad:
                add(place, bad.kind, bad.detail, *_NOTHING)

        encoded = self.encode([row for _, row in formatted])
        for (place, row), (tokens, is_target, length) in zip(formatted, encoded, strict=True):
            problem, detail = "", ""
            if len(tokens) > self.max_length:
                problem, detail = TOO_LONG, length
                if self.bad_rows is not BadRows.truncate:
                    add(place, problem, detail, *_NOTHING)
                    continue
            num_pieces = 0
            for piece, piece_target in self.cut(tokens, is_target, row.may_split):
                if piece_target.any():
                    add(place, problem, detail, piece, piece_target)
                    problem, detail = "", ""  # count a row once, not each of its pieces
                    num_pieces += 1
            if not num_pieces:
                add(place, NO_TARGET, f"within {self.max_length} tokens" if problem else "", *_NOTHING)
        return out

    def encode(self, rows: list[FormattedRow]) -> Iterator[tuple[Tokens, Mask, str]]:
        """For each row its tokens, which of them are trained on, and its length in words."""
        if not rows:
            return
        keeps_all = self.bad_rows is BadRows.truncate
        texts = [
            row.text if row.may_split and keeps_all else first_text(self.tokenizer, row.text, self.max_length)
            for row in rows
        ]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        bos, eos = self._bos_token_id(), self.tokenizer.eos_token_id
        for row, text, ids, encoding in zip(rows, texts, encoded["input_ids"], encoded.encodings, strict=True):
            tokens = np.array(ids, dtype=np.int32)
            is_target = find_targets(encoding, row.spans)
            if not row.is_chat and bos is not None and (len(tokens) == 0 or tokens[0] != bos):
                tokens, is_target = np.insert(tokens, 0, bos), np.insert(is_target, 0, False)
            if not row.is_chat and eos is not None and (len(tokens) == 0 or tokens[-1] != eos):
                tokens, is_target = np.append(tokens, np.int32(eos)), np.append(is_target, True)
            yield tokens, is_target, show_length(row.text, text, len(tokens))

    def _bos_token_id(self) -> int | None:
        bos: int | None = self.tokenizer.bos_token_id
        return bos if bos is not None and self.tokenizer("a")["input_ids"][0] == bos else None

    def cut(self, tokens: Tokens, is_target: Mask, may_split: bool) -> Iterator[tuple[Tokens, Mask]]:
        """The first `max_length` tokens of a row; if it may be split, the others too, as further rows."""
        end = len(tokens) if may_split else self.max_length
        for start in range(0, end, self.max_length):
            piece = slice(start, start + self.max_length)
            piece_target = is_target[piece].copy()
            piece_target[:1] = False  # nothing stands before the first token to predict it from
            yield tokens[piece], piece_target


def first_text(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int) -> str:
    """The text, or, of a very long one, a beginning that has the same first tokens and more than `num_tokens`.

    Where a text is cut, the last tokens before the cut may be others than in the whole text. So beginnings of twice
    the length each are tokenized until two in a row agree in their first `num_tokens` + 1 tokens.
    """
    length = max(LONG_TEXT, LONG_TOKEN * num_tokens)
    before: list[int] | None = None
    while 2 * length < len(text):
        found = encode(tokenizer, text[:length])[: num_tokens + 1]
        if len(found) > num_tokens and found == before:
            return text[:length]
        before = found
        length *= 2
    return text


def show_length(text: str, tokenized: str, num_tokens: int) -> str:
    """How long a row is, by its tokens; by its characters where a beginning of it alone was tokenized."""
    return f"{num_tokens} tokens" if len(tokenized) == len(text) else f"{len(text)} characters"


def find_targets(encoding: Encoding, spans: Sequence[Span]) -> Mask:
    """Which tokens hold a character of a span: bool [num_tokens].

    Tokens follow one another in the text, so those of a span are found by halves. The places of all tokens as a list
    would take a tenth of the time that tokenizing takes.
    """

    def place(token: int) -> Span:
        return encoding.token_to_chars(token) or (0, 0)  # None is of tokens that stand for no text: none are added here

    is_target = np.zeros(len(encoding), dtype=bool)
    tokens = range(len(encoding))
    for start, end in spans:
        first = bisect_right(tokens, start, key=lambda token: place(token)[1])
        last = bisect_left(tokens, end, key=lambda token: place(token)[0])
        is_target[first:last] = True
    return is_target


_NOTHING: tuple[Tokens, Mask] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool))
