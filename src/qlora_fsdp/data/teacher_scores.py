"""What a teacher makes of the answers in the data, in files: for each token the likeliest ones with probabilities.

`qlora-fsdp score` writes a folder of them, and a run with `distill.teacher_scores` learns from it. scores.json says of
which rows, teacher and tokenizer they are. The rows follow in order, some hundred in a file, which is written under
another name first: broken off in any way, whole files stay, and the same command goes on behind them. A row is found
again by the tokens of the teacher's prompt and of the answer, so that a run may use some of the rows, in any order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import ConfigError, DataError, Problem, RunFolderError
from qlora_fsdp.common.files import replacing, write_json
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.text import join_words, plural
from qlora_fsdp.config.schema.distill import SCORES_HEADER
from qlora_fsdp.config.settings import problem_about, show
from qlora_fsdp.data.questions import Question
from qlora_fsdp.layers.divergence import TopTeacher

SETTING = "distill.teacher_scores"
FORMAT = 1
MAX_HEADER_BYTES = 2**20
KEY_BYTES = 16
SLACK = 1e-3  # by which a logarithm of a probability may be above 0
_PART = re.compile(r"\d{8}\.safetensors")
# The tensors of a file, and the name that safetensors has for the dtype of each.
_DTYPES = {"ids": "I32", "log_probs": "F32", "given": "F32", "lengths": "I64", "keys": "U8"}


@dataclass(frozen=True)
class RowScores:
    """What a teacher makes of the T tokens of an answer.

    Attributes:
        ids: int32 [T, K], the likeliest tokens in each place, the likeliest first.
        log_probs: float32 [T, K + 1], theirs, and last that of all others together.
        given: float32 [T], those of the answer's own tokens.
    """

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    given: NDArray[np.float32]


def digest_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all tokens with their numbers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def row_key(question: Question) -> bytes:
    """What a row is found again by: a digest of the tokens of the teacher's prompt and of the answer."""
    assert question.given is not None
    parts = [np.array(tokens, dtype="<i4").tobytes() for tokens in (question.teacher_tokens, question.given)]
    digest = hashlib.sha256(len(parts[0]).to_bytes(8, "big") + parts[0] + parts[1])
    return digest.digest()[:KEY_BYTES]


class ScoreWriter:
    """Writes the folder. Only one process uses it.

    Args:
        folder: that is made, or goes on.
        identity: what the scores depend on, as values of JSON, by what decides it.
        questions: all rows, in order.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], questions: Sequence[Question]) -> None:
        self.folder = folder
        self.keys = [row_key(question) for question in questions]
        rows = hashlib.sha256(b"".join(self.keys)).hexdigest()
        self.identity = {"format": FORMAT, **identity, "rows": rows, "num_rows": len(self.keys)}

    def open(self) -> int:
        """The number of rows that are written already. Begins the folder where it is not there.

        Raises:
            ConfigError: it is of other rows, another teacher or other settings.
            RunFolderError: it can't be written, or is no such folder.
        """
        header = self.folder / SCORES_HEADER
        try:
            if not header.exists():
                self.folder.mkdir(exist_ok=True)
                if any(self.folder.iterdir()):
                    raise RunFolderError(f"out={self.folder} holds other files. Set out to a new folder.")
                write_json(header, self.identity)
                return 0
            before = read_json_object(header, MAX_HEADER_BYTES)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"out={self.folder} can't be written: {error}. Set out to a new folder.") from error
        others = [name for name, value in self.identity.items() if before.get(name) != value]
        if others:
            reason = f"was begun with another value of {join_words(others)}."
            fix = "Set out to a new folder; or remove this one, to score all anew."
            raise ConfigError([Problem(f"out={self.folder}", reason, fix, "out")])
        return sum(len(part.lengths) for part in _read_parts(self.folder))

    def add(self, first: int, rows: Sequence[RowScores]) -> None:
        """Write the next rows.

        Args:
            first: the number of the first of them.
            rows: what the teacher makes of each.

        Raises:
            RunFolderError: the disk takes no more. Whole files stay, and the same command goes on behind them.
        """
        keys = b"".join(self.keys[first : first + len(rows)])
        tensors = {
            "ids": np.concatenate([row.ids for row in rows]),
            "log_probs": np.concatenate([row.log_probs for row in rows]),
            "given": np.concatenate([row.given for row in rows]),
            "lengths": np.array([len(row.given) for row in rows], dtype=np.int64),
            "keys": np.frombuffer(keys, dtype=np.uint8).reshape(len(rows), KEY_BYTES).copy(),
        }
        file = self.folder / f"{first:08}.safetensors"
        try:
            with replacing(file) as temporary:
                save_file(tensors, temporary)
        except (OSError, SafetensorError) as error:
            raise RunFolderError(
                f"{file} can't be written: {error}. Make room: the same command goes on from there."
            ) from error


@dataclass(frozen=True)
class _Part:
    """A file of rows: its path, the tokens of each row, their keys, and how many of the likeliest tokens it has."""

    file: Path
    lengths: NDArray[np.int64]
    keys: list[bytes]
    num_top: int


def _read_parts(folder: Path) -> list[_Part]:
    """The files of a folder, in the order of their rows.

    Raises:
        RunFolderError: one is damaged, or one between them is missing.
    """
    parts: list[_Part] = []
    expected = 0
    for file in sorted(path for path in folder.iterdir() if _PART.fullmatch(path.name)):
        if int(file.stem) != expected:
            raise RunFolderError(
                f"{file} begins with row {int(file.stem) + 1}, and row {expected + 1} is missing. Remove this file and "
                "those after it, and give the command of qlora-fsdp score again."
            )
        try:
            part = _read_part(file)
            if parts and part.num_top != parts[0].num_top:
                raise ValueError(f"it has the {part.num_top} likeliest tokens, and {parts[0].file.name} has others")
        except (OSError, ValueError, SafetensorError) as error:
            raise RunFolderError(
                f"{file} is damaged: {error}. Remove it and those after it, and give the command of qlora-fsdp score "
                "again."
            ) from error
        parts.append(part)
        expected += len(part.lengths)
    return parts


def _read_part(file: Path) -> _Part:
    """What a file says of its rows.

    Raises:
        OSError: it can't be read.
        SafetensorError: it is no file of tensors, or lacks one.
        ValueError: its tensors are not those of some rows.
    """
    with safe_open(file, "np") as stored:
        slices = {name: stored.get_slice(name) for name in _DTYPES}
        dtypes = {name: slices[name].get_dtype() for name in _DTYPES}
        if dtypes != _DTYPES:
            raise ValueError("its tensors have other types")
        shapes = {name: slices[name].get_shape() for name in _DTYPES}
        if not all(shapes.values()):
            raise ValueError("one of its tensors is a single number")
        num_tokens = shapes["given"][0]
        num_rows = shapes["lengths"][0]
        num_top = shapes["ids"][-1]
        expected = {
            "ids": [num_tokens, num_top],
            "log_probs": [num_tokens, num_top + 1],
            "given": [num_tokens],
            "lengths": [num_rows],
            "keys": [num_rows, KEY_BYTES],
        }
        if shapes != expected or num_top == 0:
            raise ValueError("its tensors do not belong together")
        lengths = stored.get_tensor("lengths")
        keys = stored.get_tensor("keys")
    are_lengths = bool(((lengths > 0) & (lengths <= num_tokens)).all())
    if not are_lengths or int(lengths.sum()) != num_tokens:
        raise ValueError("its rows have other lengths than its tokens")
    return _Part(file, lengths, [bytes(key) for key in keys], num_top)


class TeacherScores:
    """The scores of a folder, which are read row by row.

    Args:
        folder: that `qlora-fsdp score` has written.
        tokenizer: the model's, whose tokens the teacher's must be.
        temperature: what the logits of both are divided by.

    Raises:
        ConfigError: the scores are of other tokens or of another temperature.
        DataError: the folder can't be read.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        self.folder = folder
        self.num_tokens = len(tokenizer)
        try:
            header = read_json_object(folder / SCORES_HEADER, MAX_HEADER_BYTES)
            if header.get("format") != FORMAT:
                raise ValueError(f"{SCORES_HEADER} has another format")
            parts = _read_parts(folder)
        except (OSError, ValueError, RunFolderError) as error:
            raise DataError(f"{SETTING}={folder} can't be read: {error}. Write it by qlora-fsdp score.") from error
        problems = []
        if header.get("tokenizer") != digest_tokens(tokenizer):
            reason = "is of a teacher with another tokenizer than the model's, whose tokens can't be compared."
            problems.append(problem_about(SETTING, str(folder), reason, "Score with a teacher that has the same."))
        if header.get("temperature") != temperature:
            reason = (
                f"was written with rollout.temperature={header.get('temperature')}, and here it is {temperature:g}."
            )
            problems.append(problem_about(SETTING, str(folder), reason, "Set the same, or score anew."))
        if problems:
            raise ConfigError(problems)
        self.places: dict[bytes, tuple[Path, int, int]] = {}
        for part in parts:
            ends = np.cumsum(part.lengths).tolist()
            for key, end, length in zip(part.keys, ends, part.lengths.tolist(), strict=True):
                self.places[key] = (part.file, end - length, end)

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse rows that the folder does not have.

        Raises:
            DataError: there are some.
        """
        missing = [question.place for question in questions if row_key(question) not in self.places]
        if missing:
            number = f"{plural(len(missing), 'row')} of {len(questions):,}"
            raise DataError(
                f"{show(SETTING, str(self.folder))} lacks {number}, the first {missing[0]}: its prompt or its answer "
                "has other tokens there, or was not scored. Give qlora-fsdp score the same settings of data.* and "
                "distill.*, and wait for its end."
            )

    def of(self, question: Question) -> RowScores:
        """What the teacher makes of a row's answer.

        Raises:
            DataError: the file is damaged.
        """
        file, begin, end = self.places[row_key(question)]
        assert question.given is not None
        try:
            with safe_open(file, "np") as stored:
                found = RowScores(*(stored.get_slice(name)[begin:end] for name in ("ids", "log_probs", "given")))
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} can't be read any more: {error}. Score these rows anew.") from error
        if end - begin != len(question.given):
            raise DataError(f"{file} is damaged: a row of it has another length than its answer. Score its rows anew.")
        are_tokens = (found.ids >= 0).all() and (found.ids < self.num_tokens).all()
        numbers = (found.log_probs, found.given)
        are_log_probs = all((np.isfinite(values) & (values <= SLACK)).all() for values in numbers)
        if not are_tokens or not are_log_probs:
            raise DataError(f"{file} is damaged: it has what is no token or no probability. Score these rows anew.")
        return found


def join_scores(rows: Sequence[RowScores]) -> TopTeacher:
    """The scores of some rows, one after another, as a loss takes them."""
    if not rows:
        return TopTeacher(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 2), torch.zeros(0))
    return TopTeacher(
        ids=torch.from_numpy(np.concatenate([row.ids for row in rows])).long(),
        log_probs=torch.from_numpy(np.concatenate([row.log_probs for row in rows])).float(),
        given=torch.from_numpy(np.concatenate([row.given for row in rows])).float(),
    )
