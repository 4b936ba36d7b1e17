"""Stage 5, cache: tokenized rows as flat files, which all ranks of a host map into memory and share.

A cache entry is a folder whose name is a fingerprint of everything that its contents depend on. It is written under a
temporary name and then renamed, so a folder with its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.counts import ProblemCounter, ReadReport
from qlora_fsdp.data.tokenize import Mask, TokenRow, Tokens

CACHE_VERSION = 9  # to be raised when the same input gives other tokens
REPORT = "report.json"


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of tokens, memory-mapped.

    Attributes:
        tokens: int32 [num_tokens], all rows one after another.
        is_target: bool [num_tokens], whether a token is trained on, or has a label. A row's first token is never
            trained on, because nothing predicts it.
        starts: int64 [num_rows + 1], where rows begin in `tokens`.
        num_targets: int32 [num_rows], targets of each row; 1 for a row that has a label as a whole.
        labels: float32 [sum of num_targets, numbers per label], as `data.labels` reads them; [0, 0] without labels.
        key: the cache entry's name, which tells these rows from any others; empty for rows that are in no entry.
    """

    num_answers = 0  # not an annotated field: rows of an entry are compared by what wraps them (data/preferences.py)

    tokens: Tokens
    is_target: Mask
    starts: NDArray[np.int64]
    num_targets: NDArray[np.int32]
    labels: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    key: str = ""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def longest_parts(self) -> NDArray[np.int64]:
        return self.lengths

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens before the first target of each row, [num_rows]."""
        targets = np.flatnonzero(self.is_target)
        return np.asarray(targets[np.searchsorted(targets, self.starts[:-1])] - self.starts[:-1])

    def read(self, row: int) -> list[TokenRow]:
        span = slice(self.starts[row], self.starts[row + 1])
        return [(self.tokens[span], self.is_target[span])]


def check_targets(rows: TokenizedRows, path: str) -> None:
    """Refuses rows that attention can learn nothing from.

    A row's second token is predicted from its first alone, which attends to nothing but itself. Where this is all that
    is trained on, queries and keys have gradients of zeros.

    Args:
        rows: tokens to predict.
        path: of their source, for the message.

    Raises:
        DataError: no row has another target.
    """
    if not len(rows.num_targets) or rows.num_targets.max() > 1:
        return
    if all(rows.is_target[start + 1] for start in rows.starts[:-1]):
        raise DataError(
            f"{path}: the only target of every row is its second token. It is predicted from the first token alone, so"
            " that attention has nothing to learn. Set training.max_length higher, data.loss_on=all, or give rows with"
            " longer answers."
        )


def fingerprint(tokenizer: PreTrainedTokenizerBase, *parts: Any) -> str:
    """A hash of the tokenizer (vocabulary, rules, special tokens, template) and of JSON values."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # left over from the last call, of this process or of the author
        rules.pop(state, None)
    identity = [
        CACHE_VERSION,
        rules,
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        parts,
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def write_entry(folder: Path, read: ReadReport, tokenized: datasets.Dataset, counts_rows: bool = False) -> ReadReport:
    """Writes tokenized rows (columns as in tokenize.FEATURES) to `folder`, which exists and is empty.

    Args:
        folder: where the files go.
        read: what is known of the rows before they are counted. With a label_width, a row without target tokens has
            its label as a whole.
        tokenized: the rows.
        counts_rows: whether a loss belongs to a row as a whole, so that each has one target, however many tokens.
    """
    counter, label_width = ProblemCounter(), read.label_width
    num_tokens, max_token_id = 0, -1
    lengths, num_targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    labels = [np.zeros(0, np.float32)]
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "is_target.bin").open("wb") as is_target_file:
        for table in tokenized.with_format("arrow").iter(batch_size=1000):
            _count(counter, table)
            tokens, is_target = _flat(table["tokens"], np.int32), _flat(table["is_target"], np.bool_)
            row_lengths = table["tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
            row_lengths = row_lengths[row_lengths > 0]
            if not len(row_lengths):
                continue
            tokens.tofile(tokens_file)
            is_target.tofile(is_target_file)
            lengths.append(row_lengths.astype(np.int64))
            row_starts = np.cumsum(row_lengths) - row_lengths
            row_targets = np.add.reduceat(is_target, row_starts, dtype=np.int32)
            least, most = int(label_width > 0 or counts_rows), 1 if counts_rows else None
            num_targets.append(np.clip(row_targets, least, most))
            labels.append(_flat(table["labels"], np.float32))
            num_tokens += len(tokens)
            max_token_id = max(max_token_id, int(tokens.max()))
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    starts.tofile(folder / "starts.bin")
    np.concatenate(num_targets).tofile(folder / "num_targets.bin")
    np.concatenate(labels).tofile(folder / "labels.bin")
    report = replace(
        read,
        num_used_rows=len(starts) - 1,
        num_tokens=num_tokens,
        max_token_id=max_token_id,
        problems=counter.problems(),
    )
    (folder / REPORT).write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    return report


def load_entry(folder: Path) -> tuple[TokenizedRows, ReadReport]:
    """Maps a cache entry into memory.

    Raises:
        OSError, ValueError, KeyError, TypeError: it does not exist, or is not whole.
    """
    report = ReadReport.from_json(json.loads((folder / REPORT).read_text(encoding="utf-8")))

    def load(name: str, dtype: type[np.generic], length: int) -> NDArray[Any]:
        size, expected = (folder / name).stat().st_size, length * np.dtype(dtype).itemsize
        if size != expected:
            raise ValueError(f"{folder / name} has {size} bytes, not {expected}")
        return np.memmap(folder / name, dtype=dtype, mode="r", shape=(length,)) if length else np.zeros(0, dtype)

    num_targets = np.array(load("num_targets.bin", np.int32, report.num_used_rows))
    num_labels = int(num_targets.sum()) if report.label_width else 0
    rows = TokenizedRows(
        tokens=load("tokens.bin", np.int32, report.num_tokens),
        is_target=load("is_target.bin", np.bool_, report.num_tokens),
        starts=np.array(load("starts.bin", np.int64, report.num_used_rows + 1)),
        num_targets=num_targets,
        labels=np.array(load("labels.bin", np.float32, num_labels * report.label_width)).reshape(
            num_labels, report.label_width
        ),
        key=folder.name,
    )
    return rows, report


def _count(counter: ProblemCounter, table: pa.Table) -> None:
    """Counts the rows of a table that have a problem."""
    is_kept = table["tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False) > 0
    for index in (number for number, kind in enumerate(table["problem"].to_pylist()) if kind):
        place, kind, detail = (table[column][index].as_py() for column in ("place", "problem", "detail"))
        counter.add(place, kind, detail, bool(is_kept[index]))


def _flat(column: pa.ChunkedArray, dtype: type[np.generic]) -> NDArray[Any]:
    values: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False)
