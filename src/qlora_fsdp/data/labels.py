"""Stages 2 to 4 for rows with labels: checked and tokenized, with their labels as numbers.

A row is {"text": ..., "label": ...}. Two texts that are judged together are {"text": ..., "text_pair": ..., "label":
...}, the names that a stock pipeline has for them. If words have labels, a row is {"tokens": [words], "labels": [one
per word]}. The tokens are those that a stock pipeline makes of the same text, special tokens included, so that an
adapter sees in use what it saw in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import BadRows, ProblemType, TaskConfig, TaskName
from qlora_fsdp.data.columns import COMMON_NAMES, rename, show_keys
from qlora_fsdp.data.guess import names_of, show_columns
from qlora_fsdp.data.row import EMPTY, NO_TARGET, TOO_LONG, WRONG_KEYS, WRONG_LABEL, WRONG_TYPES, BadRow, parse_row
from qlora_fsdp.data.tokenize import COLUMNS, Columns, add_row, first_text, show_length
from qlora_fsdp.data.tokenizer import try_texts

LABEL_KEYS = ("label", "labels")
WORD_LABEL_KEYS = ("labels", "ner_tags", "tags")
# What data sets call two texts that are judged together, in the order in which they are read.
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
)
NO_LABEL = (None, -100)  # the labels of a word that has none
MAX_DIGITS = 20  # of an index. Python reads no whole number of more than 4,300
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LabelledRowTokenizer:
    """Checks and tokenizes batches of labelled rows."""

    tokenizer: PreTrainedTokenizerBase
    task: TaskConfig
    max_length: int
    bad_rows: BadRows
    columns: Mapping[str, str]

    def __call__(self, batch: Columns) -> Columns:
        """Maps columns `place` and `row` to COLUMNS. Each row gives one; a bad one stays, empty."""
        out: Columns = {name: [] for name in COLUMNS}
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                problem, tokens, is_target, labels = self._encode(raw)
                add_row(out, place, *problem, (np.array(tokens, np.int32), np.array(is_target, np.bool_)), labels)
            except BadRow as bad:
                add_row(out, place, bad.kind, bad.detail)
        return out

    def _encode(self, raw: bytes) -> tuple[tuple[str, str], list[int], list[bool], list[float]]:
        row = rename(parse_row(raw), label_columns(self.columns, self.task))
        if self.task.name is TaskName.sequence_classification:
            text, pair = read_text(row), read_pair(row)
            labels = read_labels(row, self.task)
            problem, tokens, _ = self.tokenize(text, pair)
            return problem, tokens, [False] * len(tokens), labels
        words, word_labels = _read_words(row, self.task)
        problem, tokens, offsets = self.tokenize(" ".join(words))
        is_labelled, labels = label_first_tokens(words, word_labels, offsets)
        if not labels:
            raise BadRow(NO_TARGET, f"within {self.max_length} tokens" if problem[0] else "no word has a label")
        return problem, tokens, is_labelled, labels

    def tokenize(self, text: str, pair: str | None = None) -> tuple[tuple[str, str], list[int], list[tuple[int, int]]]:
        """What is wrong with the length, token ids, and where each token is in the text; special ones are nowhere.

        Args:
            text: of a row.
            pair: the second text of the row; None: it has one text.
        """
        whole, text = text, first_text(self.tokenizer, text, self.max_length)
        texts = [text]
        if pair is not None:
            whole += pair
            texts.append(first_text(self.tokenizer, pair, self.max_length))
        try_texts(self.tokenizer, texts)
        encoded = self.tokenizer(*texts, return_offsets_mapping=True, verbose=False)
        if pair is not None and any(encoded.get("token_type_ids", ())):
            reason = "the model tells text_pair from text by token types, with which it is not trained here"
            raise BadRow(WRONG_KEYS, f"{reason}; write both texts in text")
        problem = ("", "")
        if len(encoded["input_ids"]) > self.max_length:
            problem = (TOO_LONG, show_length(whole, "".join(texts), len(encoded["input_ids"])))
            if self.bad_rows is not BadRows.truncate:
                raise BadRow(*problem)
            # The tokenizer cuts, because its last token may be a special one that must stay; of a pair the longer text.
            encoded = self.tokenizer(*texts, return_offsets_mapping=True, truncation=True, max_length=self.max_length)
        return problem, encoded["input_ids"], encoded["offset_mapping"]


def label_columns(columns: Mapping[str, str], task: TaskConfig) -> dict[str, str]:
    """data.columns for rows with labels, in which `label` and `labels` mean the same."""
    key, other = ("labels", "label") if task.name is TaskName.token_classification else ("label", "labels")
    return {key if ours == other else ours: theirs for ours, theirs in columns.items()}


def used_label_columns(names: Sequence[str], columns: Mapping[str, str], task: TaskConfig) -> list[str]:
    """The columns of a table that rows with labels need; all of them if there is no label among them."""
    columns = label_columns(columns, task)
    is_words = task.name is TaskName.token_classification
    given, labels = ("tokens", WORD_LABEL_KEYS) if is_words else ("text", LABEL_KEYS)
    more = () if is_words else ("text_pair",)
    of_labels = {columns.get(key, key) for key in labels}
    wanted = {columns.get(key, key) for key in (given, *more)} | of_labels
    found = [name for name in names if name in wanted]
    return found if columns.get(given, given) in found and of_labels & set(found) else list(names)


def read_text(row: dict[str, Any]) -> str:
    """The text of a row.

    Raises:
        BadRow: it has none.
    """
    text = row.get("text")
    if text is None:
        raise BadRow(WRONG_KEYS, _no_text(row))
    if not isinstance(text, str):
        raise BadRow(WRONG_TYPES, f"text is {type(text).__name__}, not text")
    if not text.strip():
        raise BadRow(EMPTY, "text is empty")
    return text


def read_pair(row: dict[str, Any]) -> str | None:
    """The second text of a row; None: it has one text.

    Raises:
        BadRow: it is no text.
    """
    pair = row.get("text_pair")
    if not isinstance(pair, (str, type(None))):
        raise BadRow(WRONG_TYPES, f"text_pair is {type(pair).__name__}, not text")
    return pair


def read_labels(row: dict[str, Any], task: TaskConfig) -> list[float]:
    """The numbers that a row's label stands for: its index; 0 or 1 for each label; or the numbers themselves.

    Several labels are a list of names or indices, or of a 0 or 1 for each label. `check_lists` has made sure that the
    two forms can be told apart.

    Raises:
        BadRow: the row has no label, or one that is not in task.labels.
    """
    key = _label_key(row)
    if key is None:
        raise BadRow(WRONG_KEYS, _no_key("label", row))
    value, names = row[key], task.labels or []
    match task.problem_type:
        case ProblemType.single_label_classification:
            return [float(_index(value, names))]
        case ProblemType.multi_label_classification:
            return _read_several(key, value, names)
        case ProblemType.regression:
            return _read_numbers(key, value, num_outputs(task))
        case other:
            assert_never(other)


def _read_several(key: str, value: Any, names: list[str]) -> list[float]:
    """For each label a 0 or 1, of a list of labels."""
    if not isinstance(value, list):
        raise BadRow(WRONG_LABEL, f"{key} is {value!r}, not a list of labels")
    if _may_be_flags(value, names):
        return [float(flag) for flag in value]
    chosen = [_index(item, names) for item in value]
    if len(set(chosen)) < len(chosen):
        raise BadRow(WRONG_LABEL, f"{key} is {value!r}, which names a label twice")
    return [float(index in chosen) for index in range(len(names))]


def _read_numbers(key: str, value: Any, wanted: int) -> list[float]:
    """Read a label's numbers, of which there must be as many as the head has outputs."""
    numbers = [_number(item) for item in (value if isinstance(value, list) else [value])]
    finite = [number for number in numbers if number is not None]
    if not len(numbers) == len(finite) == wanted:
        needed = "a finite number" if wanted == 1 else f"{wanted} finite numbers"
        raise BadRow(WRONG_LABEL, f"{key} is {shorten(repr(value))}, not {needed}")
    return finite


def check_lists(rows: Iterable[tuple[str, bytes]], task: TaskConfig, columns: Mapping[str, str]) -> None:
    """Refuses lists of labels of which nobody can tell whether they are indices or a 0 or 1 for each label.

    With two labels, [0, 1] may be either. It is taken for a 0 or 1 for each label if the lists of all rows may be that.

    Args:
        rows: places and rows.
        task: the task of the run.
        columns: data.columns.

    Raises:
        DataError: there is such a list, and the list of another row can only be indices or names.
    """
    names = task.labels or []
    if task.problem_type is not ProblemType.multi_label_classification or len(names) not in (1, 2):
        return  # with more than two labels, a 0 or 1 for each names a label twice if it is read as indices
    unclear: tuple[str, list[Any]] | None = None
    other: tuple[str, list[Any]] | None = None
    for place, raw in rows:
        try:
            row = rename(parse_row(raw), label_columns(columns, task))
        except BadRow:
            continue
        value = row.get(_label_key(row) or "")
        if not isinstance(value, list):
            continue
        if not _may_be_flags(value, names):
            other = other or (place, value)
        elif len(set(value)) == len(value) and max(value) < len(names) and not any(isinstance(v, bool) for v in value):
            unclear = unclear or (place, value)
    if unclear is None or other is None:
        return
    flags = ", ".join(["true", "false"][: len(names)])
    raise DataError(
        f"{unclear[0]} has the label {unclear[1]}: indices of task.labels ({', '.join(names)}), or a 0 or 1 for each "
        f"of them? It can't be told, as {other[0]} has {other[1]}. Write names in all rows "
        f"({json.dumps(names)}), or true or false for each label ([{flags}])."
    )


def _read_words(row: dict[str, Any], task: TaskConfig) -> tuple[list[str], list[int | None]]:
    """The words of a row and the index of each word's label; None: the word has none (-100 or null in the row).

    Raises:
        BadRow: there are no words, not as many labels as words, or a label that is not in task.labels.
    """
    if "tokens" not in row:
        raise BadRow(WRONG_KEYS, _no_key("tokens", row))
    key = next((key for key in WORD_LABEL_KEYS if key in row), None)
    if key is None:
        raise BadRow(WRONG_KEYS, _no_key("labels", row))
    words = row["tokens"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadRow(WRONG_TYPES, "tokens is not a list of words")
    labels = row[key]
    wanted = f"not a list of one label for each of the {len(words)} tokens"
    if not isinstance(labels, list):
        raise BadRow(WRONG_LABEL, f"{key} is {type(labels).__name__}, {wanted}")
    if len(labels) != len(words):
        raise BadRow(WRONG_LABEL, f"{key} has {len(labels)}, {wanted}")
    if not any(word.strip() for word in words):
        raise BadRow(EMPTY, "tokens is empty")
    names = task.labels or []
    return words, [None if label in NO_LABEL else _index(label, names) for label in labels]


def label_first_tokens(
    words: list[str], labels: list[int | None], offsets: list[tuple[int, int]]
) -> tuple[list[bool], list[float]]:
    """Gives each word's label to the first token that has a character of the word.

    Args:
        words: the words of the text, which single spaces join.
        labels: the index of each word's label; None: the word has none.
        offsets: start and end of the tokens in the text; those of special tokens are equal.

    Returns:
        For each token whether it has a label, and the labels of those that have one. A word has no token, and its
        label is left out, if the tokenizer drops it or the row is cut before it.
    """
    is_labelled = [False] * len(offsets)
    found: list[float] = []
    begin = 0
    token = 0
    for word, label in zip(words, labels, strict=True):
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        if token < len(offsets) and offsets[token][0] < begin + len(word):
            if label is not None:
                is_labelled[token] = True
                found.append(float(label))
            token += 1
        begin += len(word) + 1
    return is_labelled, found


def _no_text(row: dict[str, Any]) -> str:
    """That a row has no text, with the setting that reads its two texts, or its one text, of names that are common."""
    texts = {key: value for key, value in row.items() if isinstance(value, str) and value.strip()}
    pairs = [names_of(texts, names) for names in PAIR_NAMES]
    names = next((found for found in pairs if len(found) == 2), names_of(texts, COMMON_NAMES["text"])[:1])
    if not names:
        return _no_key("text", row)
    return (
        f"no text; keys are {show_keys(row)}; set {show_columns(dict(zip(('text', 'text_pair'), names, strict=False)))}"
    )


def _no_key(key: str, row: dict[str, Any]) -> str:
    return f"no {key} (keys: {show_keys(row)}; data.columns={{{key}: NAME}} says which it is)"


def _label_key(row: dict[str, Any]) -> str | None:
    return next((key for key in LABEL_KEYS if key in row), None)


def _may_be_flags(value: list[Any], names: list[str]) -> bool:
    """Whether a list may be a 0 or 1 (or false or true) for each label. Where names are numbers, numbers are names."""
    if len(value) != len(names):
        return False
    are_numbers = not _are_numbers(names) and all(isinstance(item, (int, float)) for item in value)
    return (are_numbers and all(item in (0, 1) for item in value)) or all(isinstance(item, bool) for item in value)


def _index(value: Any, names: list[str]) -> int:
    """The index of a label that a row gives by its name, or by its index unless names are numbers. CSV has text.

    True and false are names too, as task.labels=[false,true] has them.
    """
    written: tuple[str, ...] = ()  # ways to write the value, as a name or as an index
    if isinstance(value, bool):
        written = (str(value).lower(), str(value))
    elif isinstance(value, float) and value.is_integer():
        written = (str(value), str(int(value)))
    elif isinstance(value, (str, int, float)):
        written = (str(value),)
    for text in written:
        if text in names:
            return names.index(text)
    if written and _is_index(written[-1]) and not _are_numbers(names):
        index = int(written[-1])
        if index < len(names):
            return index
    shown = ", ".join(names[:8])
    if len(names) > 8:
        shown += ", ..."
    raise BadRow(WRONG_LABEL, f"{shorten(repr(value))} is neither one of task.labels ({shown}) nor an index of them")


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < MAX_DIGITS


def _are_numbers(names: list[str]) -> bool:
    """Whether a name of a label is a number, such as 3 or 0.5, so that numbers in rows are names and no indices."""
    return any(_number(name) is not None for name in names)


def _number(value: Any) -> float | None:
    """A value as a finite number of float32; None: it is no such number. CSV has numbers as text."""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= FLOAT32_MAX else None


def num_outputs(task: TaskConfig) -> int:
    """Number of outputs of the head."""
    return len(task.labels) if task.labels else 1


def label_width(task: TaskConfig) -> int:
    """Numbers per label."""
    return 1 if task.problem_type is ProblemType.single_label_classification else num_outputs(task)


def count_labels(labels: NDArray[np.float32], task: TaskConfig) -> dict[str, int]:
    """How often each of `labels` [num_labels, width], as `read_labels` gives them, occurs; empty for a regression."""
    names = task.labels or []
    match task.problem_type:
        case ProblemType.single_label_classification:
            counts = np.bincount(labels[:, 0].astype(np.int64), minlength=len(names))
        case ProblemType.multi_label_classification:
            counts = labels.sum(0).astype(np.int64)
        case ProblemType.regression:
            return {}
        case other:
            assert_never(other)
    return dict(zip(names, counts.tolist(), strict=True))


def doubt_labels(counts: Mapping[str, int]) -> tuple[str, ...]:
    """What is likely to be a mistake about labels that occur so often, for the user."""
    missing = [name for name, number in counts.items() if not number]
    found = [name for name, number in counts.items() if number]
    if len(found) == 1 and missing:
        return (f"every row has the label {found[0]}: there is nothing to tell apart. Add rows with other labels.",)
    if missing:
        return (
            f"no row has the label {shorten(' or '.join(missing))}. Add such rows, or leave it out of task.labels.",
        )
    return ()


def name_labels(labels: NDArray[np.float32], task: TaskConfig) -> str:
    """The names of labels, for people to read. `labels` is [num_labels, width], as `read_labels` gives them."""
    names = task.labels or []
    match task.problem_type:
        case ProblemType.single_label_classification:
            return " ".join(names[int(index)] for index in labels[:, 0])
        case ProblemType.multi_label_classification:
            return " ".join(names[index] for index in np.flatnonzero(labels[0])) or "none"
        case ProblemType.regression:
            return " ".join(f"{number:g}" for number in labels[0])
        case other:
            assert_never(other)
