"""Stage 4, tokenize: raw rows → token ids and, for each token, whether it is trained on. Runs in worker processes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn, Thoughts
from qlora_fsdp.data.chats.stops import ends_of
from qlora_fsdp.data.chats.template import Span
from qlora_fsdp.data.cut import MAY_SPLIT, SAME_ROW, CutSettings, FlatRows, all_rows, cut_rows
from qlora_fsdp.data.format import FormattedRow, format_row
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import NO_TARGET, BadRow, add_system_prompt, parse_row
from qlora_fsdp.data.tokenizer import begin_tokens, blaming_tokenizer, encode, try_texts

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]
TokenRow = tuple[Tokens, Mask]  # a row of tokens, and which of them are trained on

Columns = dict[str, list[Any]]
COLUMNS = (
    "place",
    "problem",  # a kind of data.row, or empty
    "detail",  # what else there is to say; of a row of which a beginning alone is there, its length
    "tokens",  # empty: the row is left out
    "is_target",
    "labels",  # of a row, or of its targets; see data.labels
    "flags",  # see data.cut and data.chats.told
)
# Of a text with more characters than LONG_TEXT, and than LONG_TOKEN for each token that may be kept, a beginning alone
# is tokenized.
LONG_TEXT = 2**17
LONG_TOKEN = 16


@dataclass(frozen=True)
class RowTokenizer:
    """Checks, formats and tokenizes batches of raw rows.

    The end token stands exactly once after what is no chat, unless that ends with a stop token itself, and so do the
    tokens before it that the tokenizer adds by itself, such as a begin token. In a chat the template decides.
    """

    tokenizer: PreTrainedTokenizerBase
    data_format: DataFormat
    loss_on: LossOn
    max_length: int
    bad_rows: BadRows
    columns: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    thoughts: Thoughts = Thoughts.last

    def __call__(self, batch: Columns) -> Columns:
        """Maps columns `place` and `row` to COLUMNS. A row may become several; a bad one stays, empty."""
        return _cut_batch(self.whole(batch), CutSettings(self.max_length, self.bad_rows is BadRows.truncate))

    def whole(self, batch: Columns) -> Columns:
        """Maps columns `place` and `row` to COLUMNS, one row for each or, by `Thoughts.all`, several, not yet cut.

        Of a row that is too long, and is not split, it is a beginning of more than `max_length` tokens.
        """
        out: Columns = {name: [] for name in COLUMNS}
        formatted: list[tuple[str, FormattedRow, bool]] = []
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                form, fields = read_row(parse_row(raw), self.data_format, self.columns)
                if self.system_prompt and form is DataFormat.messages:
                    fields = add_system_prompt(fields, self.system_prompt)
                rows = format_row(form, fields, self.loss_on, self.tokenizer, self.thoughts)
                formatted += [(place, row, number > 0) for number, row in enumerate(rows)]
            except BadRow as bad:
                add_row(out, place, bad.kind, bad.detail)
        encoded = self.encode([row for _, row, _ in formatted])
        for (place, row, is_further), (row_tokens, detail) in zip(formatted, encoded, strict=True):
            problem = "" if len(row_tokens[0]) else NO_TARGET
            flags = row.told | (MAY_SPLIT if row.may_split else 0) | (SAME_ROW if is_further else 0)
            add_row(out, place, problem, detail, row_tokens, flags=flags)
        return out

    def encode(self, rows: list[FormattedRow]) -> Iterator[tuple[TokenRow, str]]:
        """For each row its tokens; of one that is too long, and is not split, a beginning, and its length in words."""
        if not rows:
            return
        keeps_all = self.bad_rows is BadRows.truncate
        texts = [
            row.text if row.may_split and keeps_all else first_text(self.tokenizer, row.text, self.max_length)
            for row in rows
        ]
        try_texts(self.tokenizer, texts)
        with blaming_tokenizer():
            encoded = self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,
            )
        begin, eos = begin_tokens(self.tokenizer), self.tokenizer.eos_token_id
        ends = () if all(row.is_chat for row in rows) else ends_of(self.tokenizer)
        for row, text, ids, encoding in zip(rows, texts, encoded["input_ids"], encoded.encodings, strict=True):
            tokens = np.array(ids, dtype=np.int32)
            is_target = find_target_tokens(encoding, row.spans)
            if not row.is_chat and ids[: len(begin)] != begin:
                tokens = np.concatenate([np.array(begin, dtype=np.int32), tokens])
                is_target = np.concatenate([np.zeros(len(begin), dtype=bool), is_target])
            needs_end = not row.is_chat and not (ends and row.text.rstrip().endswith(ends))
            if needs_end and eos is not None and (len(tokens) == 0 or tokens[-1] != eos):
                tokens, is_target = np.append(tokens, np.int32(eos)), np.append(is_target, True)
            is_target[:1] = False  # nothing stands before the first token to predict it from
            if len(tokens) > self.max_length and not (row.may_split and keeps_all):
                one_more = slice(self.max_length + 1)  # by which it is known to be too long
                yield (tokens[one_more], is_target[one_more]), show_length(row.text, text, len(tokens))
            else:
                yield (tokens, is_target), ""


def add_row(
    out: Columns,
    place: str,
    problem: str,
    detail: str,
    row: TokenRow | None = None,
    labels: Sequence[float] = (),
    flags: int = 0,
) -> None:
    """Appends a row to COLUMNS; None: it is left out."""
    tokens, is_target = row or (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool))
    for name, value in zip(COLUMNS, (place, problem, detail, tokens, is_target, labels, flags), strict=True):
        out[name].append(value)


def _cut_batch(whole: Columns, settings: CutSettings) -> Columns:
    """Cuts the rows of COLUMNS. Bad rows come first, each once; of the others each piece is a row, in their order."""
    out: Columns = {name: [] for name in COLUMNS}
    good = [number for number, tokens in enumerate(whole["tokens"]) if len(tokens)]
    for number in sorted({*range(len(whole["tokens"]))} - {*good}):
        add_row(out, *(whole[name][number] for name in ("place", "problem", "detail")))
    if not good:
        return out
    place, details, tokens, is_target, flags = (
        [whole[name][number] for number in good] for name in ("place", "detail", "tokens", "is_target", "flags")
    )
    flat = FlatRows(
        tokens=np.concatenate(tokens),
        is_target=np.concatenate(is_target),
        starts=np.cumsum([0, *map(len, tokens)]),
        num_targets=np.array([np.count_nonzero(mask) for mask in is_target], dtype=np.int32),
        flags=np.array(flags, dtype=np.uint8),
    )
    pieces = cut_rows(flat, settings) or all_rows(flat)
    told = {  # of a row, the problem and what there is to say of it
        row: (
            problem.kind,
            (details[row] or f"{len(tokens[row])} tokens") if problem.detail is None else problem.detail,
        )
        for problem in pieces.problems
        for row in problem.rows.tolist()
    }
    spans: dict[int, list[slice]] = {}
    for row, start, end in zip(pieces.rows.tolist(), pieces.starts.tolist(), pieces.ends.tolist(), strict=True):
        spans.setdefault(row, []).append(slice(start, end))
    for row in range(len(good)):
        problem = told.get(row, ("", ""))
        if row in told and row not in spans:
            add_row(out, place[row], *problem)
        for span in spans.get(row, []):
            mask = flat.is_target[span].copy()
            mask[:1] = False
            add_row(out, place[row], *problem, (flat.tokens[span], mask), flags=flags[row])
            problem = ("", "")  # a row is counted once, not each of its pieces
    return out


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


def find_target_tokens(encoding: Encoding, spans: Sequence[Span]) -> Mask:
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
        # Some tokenizers say that tokens of spaces alone are empty, and stand where the spaces end.
        is_target[first : max(last, bisect_right(tokens, end, key=lambda token: place(token)[1]))] = True
    return is_target
