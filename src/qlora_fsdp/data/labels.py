"""Stages 2 to 4 for labelled rows, {"text": ..., "label": ...}: tokens as the tokenizer makes them, and numbers.

The tokens are those that a stock pipeline makes of the same text, special tokens included, so that an adapter sees in
use what it saw in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.config.schema import BadRows, ProblemType, TaskConfig
from qlora_fsdp.data.check import EMPTY, TOO_LONG, WRONG_KEYS, WRONG_LABEL, WRONG_TYPES, BadRow, parse_row
from qlora_fsdp.data.tokenize import FEATURES

LABEL_KEYS = ("label", "labels")


@dataclass(frozen=True)
class LabelledRowTokenizer:
    """Checks and tokenizes batches of labelled rows; the function of `datasets.map`."""

    tokenizer: PreTrainedTokenizerBase
    task: TaskConfig
    max_length: int
    bad_rows: BadRows

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Maps columns `place` and `row` to those of FEATURES: a row a row, and a bad one stays, empty."""
        out: dict[str, list[Any]] = {name: [] for name in FEATURES}
        for place, raw in zip(batch["place"], batch["row"], strict=True):
            try:
                problem, tokens, labels = self._encode(raw)
                values = (place, *problem, tokens, [False] * len(tokens), labels)
            except BadRow as bad:
                values = (place, bad.kind, bad.detail, [], [], [])
            for name, value in zip(FEATURES, values, strict=True):
                out[name].append(value)
        return out

    def _encode(self, raw: bytes) -> tuple[tuple[str, str], list[int], list[float]]:
        row = parse_row(raw)
        text = row.get("text")
        if text is None:
            raise BadRow(WRONG_KEYS, f"no text (keys: {', '.join(row)})")
        if not isinstance(text, str):
            raise BadRow(WRONG_TYPES, f"text is {type(text).__name__}, not text")
        if not text.strip():
            raise BadRow(EMPTY, "text is empty")
        labels = read_labels(row, self.task)
        tokens: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        if len(tokens) <= self.max_length:
            return ("", ""), tokens, labels
        detail = f"{len(tokens)} tokens"
        if self.bad_rows is not BadRows.truncate:
            raise BadRow(TOO_LONG, detail)
        # The tokenizer cuts, because its last token may be a special one that must stay.
        tokens = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        return (TOO_LONG, detail), tokens, labels


def read_labels(row: dict[str, Any], task: TaskConfig) -> list[float]:
    """The numbers that a row's label stands for: its index; 0 or 1 for each label; or the numbers themselves.

    Raises:
        BadRow: it has none, or one that is not in task.labels.
    """
    key = next((key for key in LABEL_KEYS if key in row), None)
    if key is None:
        raise BadRow(WRONG_KEYS, f"no label (keys: {', '.join(row)})")
    value, names = row[key], task.labels or []
    if task.problem_type is ProblemType.single_label_classification:
        return [float(_index(value, names))]
    if task.problem_type is ProblemType.multi_label_classification:
        if not isinstance(value, list):
            raise BadRow(WRONG_LABEL, f"{key} is {value!r}, not a list of labels")
        chosen = {_index(item, names) for item in value}
        return [float(index in chosen) for index in range(len(names))]
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) != num_outputs(task) or not all(_is_number(number) for number in numbers):
        raise BadRow(WRONG_LABEL, f"{key} is {value!r}, not {num_outputs(task)} finite numbers")
    return [float(number) for number in numbers]


def num_outputs(task: TaskConfig) -> int:
    """Outputs of the head."""
    return len(task.labels) if task.labels else 1


def label_width(task: TaskConfig) -> int:
    """Numbers that `read_labels` gives for a row."""
    return 1 if task.problem_type is ProblemType.single_label_classification else num_outputs(task)


def count_labels(labels: NDArray[np.float32], task: TaskConfig) -> dict[str, int]:
    """How many rows have each label; empty for regression. labels: [num_rows, width], as `read_labels` gives them."""
    names = task.labels or []
    if task.problem_type is ProblemType.single_label_classification:
        counts = np.bincount(labels[:, 0].astype(np.int64), minlength=len(names))
    elif task.problem_type is ProblemType.multi_label_classification:
        counts = labels.sum(0).astype(np.int64)
    else:
        return {}
    return dict(zip(names, counts.tolist(), strict=True))


def _index(value: Any, names: list[str]) -> int:
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise BadRow(WRONG_LABEL, f"{value!r} is neither one of task.labels ({shown}) nor an index of them")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))
