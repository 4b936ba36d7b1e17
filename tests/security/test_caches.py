"""Caches tell nobody what is private, and what another user puts into one's own is not trained on."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

from qlora_fsdp.common.errors import ConfigError, DataError
from qlora_fsdp.common.foreign_files import check_owner, close_to_others
from qlora_fsdp.config.schema import Config, DataConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.teacher_scores import TeacherScores
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.weights import quantized_cache
from tests.helpers.one_process import one_process
from tests.security.kinds_of_records import QUESTIONS, make_scores

TOKENIZER = byte_tokenizer()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "secret"}) + "\n")
    return file


def prepare(rows: Path, folder: Path | None = None) -> Sequences:
    config = Config(data=DataConfig(path=str(rows), cache_folder=None if folder is None else str(folder)))
    train = prepare_data(DataSpec.of(config), TOKENIZER, one_process(), 259).train
    assert isinstance(train, Sequences)
    return train


def entry_in(folder: Path) -> Path:
    (entry,) = (path for path in folder.iterdir() if path.is_dir())
    return entry


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.iterdir())}


def test_the_default_folder_is_closed_to_others(rows: Path):
    before = os.umask(0o022)
    try:
        prepare(rows)
    finally:
        os.umask(before)
    folder = rows.parent / "home/.cache/qlora_fsdp/data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and modes(entry_in(folder)) == {0}


def test_what_is_made_of_a_private_file_is_private_in_a_shared_folder_too(rows: Path):
    """Where everybody may read the data, everybody may read what was made of it: the folder is there to be shared."""
    before = os.umask(0o022)
    try:
        for mode, folder in ((0o600, "a"), (0o640, "b"), (0o644, "c")):
            rows.chmod(mode)
            prepare(rows, rows.parent / folder)
    finally:
        os.umask(before)
    assert modes(entry_in(rows.parent / "a")) == {0}
    assert modes(entry_in(rows.parent / "b")) == {0o040, 0o050}
    assert modes(entry_in(rows.parent / "c")) == {0o044, 0o055}


def test_a_user_without_a_home_is_told_what_to_set(rows: Path, monkeypatch: pytest.MonkeyPatch):
    def unknown(user: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"HOME is not set.*Set HOME, or the folder by name \(data.cache_folder"):
        prepare(rows)
    prepare(rows, rows.parent / "typed")


def test_a_shared_folder_that_one_may_only_read_is_used(rows: Path, monkeypatch: pytest.MonkeyPatch):
    folder = rows.parent / "shared"
    prepare(rows, folder)
    for file in folder.glob("*.lock"):
        file.unlink()

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("only to read")

    monkeypatch.setattr("qlora_fsdp.data.tokenize_source.FileLock", refuse)  # root may write to any folder
    assert len(prepare(rows, folder)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_an_entry_of_another_users_is_refused_by_name_unless_the_folder_was_typed(rows: Path):
    prepare(rows)
    folder = rows.parent / "home/.cache/qlora_fsdp/data"
    entry = entry_in(folder)
    os.chown(entry, 12345, -1)
    with pytest.raises(DataError, match=rf"{entry} belongs to another user \(number 12345\)") as caught:
        prepare(rows)
    assert "set the folder by name if you trust them" in str(caught.value)
    assert len(prepare(rows, folder)) == 1
    with pytest.raises(PermissionError):
        check_owner(entry, None)
    check_owner(entry, str(folder))


def test_quantized_weights_are_kept_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(folder: Path, *others: object) -> None:
        (folder / "quantized-00001.safetensors").touch(0o644)

    monkeypatch.setattr(quantized_cache, "_write", write)
    (tmp_path / ".entry.killed.tmp").mkdir()
    quantized_cache._make(tmp_path / "entry", None, [], torch.bfloat16, torch.device("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["entry"] and modes(tmp_path / "entry") == {0}
    shared = tmp_path / "shared"
    quantized_cache._make(shared, str(tmp_path), [], torch.bfloat16, torch.device("cpu"))
    assert modes(shared) != {0}
    (tmp_path / "model.safetensors").touch(0o600)
    close_to_others(shared, str(tmp_path), [tmp_path / "model.safetensors"])
    assert modes(shared) == {0}


FORGED_SCORES: dict[str, dict[str, NDArray[np.generic]]] = {
    "another row's length": {"lengths": np.array([2, 3], dtype=np.int64)},
    "lengths whose sum overflows": {"lengths": np.array([2**62, 2**62, 2**62, 2**62 + 5], dtype=np.int64)},
    "lengths with no row": {"lengths": np.zeros((0, 1), dtype=np.int64)},
    "a length for all": {"lengths": np.array(5, dtype=np.int64)},
    "tokens that are no whole numbers": {"ids": np.zeros((5, 4), dtype=np.float16)},
    "no likeliest token": {"ids": np.zeros((5, 0), dtype=np.int32), "log_probs": np.zeros((5, 1), dtype=np.float32)},
    "tokens that are none": {"ids": np.full((5, 4), 1_000, dtype=np.int32)},
    "a probability of 0": {"given": np.full(5, -np.inf, dtype=np.float32)},
    "no number": {"log_probs": np.full((5, 5), np.nan, dtype=np.float32)},
}


@pytest.mark.parametrize("name", FORGED_SCORES)
def test_forged_scores_of_a_teacher_are_told(name: str, tmp_path: Path) -> None:
    """Each of them is a whole file, which no reader of safetensors would refuse."""
    make_scores(tmp_path)
    first, second = (tmp_path / "scores" / f"{number:08}.safetensors" for number in range(2))
    halves = [load_arrays(file) for file in (first, second)]
    second.unlink()
    both = {key: np.concatenate([half[key] for half in halves]) for key in halves[0]}
    save_arrays(both, first)
    scores = TeacherScores(tmp_path / "scores", TOKENIZER, temperature=1.0)
    assert len(scores.of(QUESTIONS[1]).given) == 2
    save_arrays(both | FORGED_SCORES[name], first)
    with pytest.raises(DataError, match="is damaged"):
        scores = TeacherScores(tmp_path / "scores", TOKENIZER, temperature=1.0)
        scores.check(QUESTIONS)
        for question in QUESTIONS:
            scores.of(question)


def test_scores_with_other_numbers_of_likeliest_tokens_do_not_go_together(tmp_path: Path) -> None:
    make_scores(tmp_path)
    file = tmp_path / "scores" / "00000001.safetensors"
    stored = load_arrays(file)
    fewer = {"ids": stored["ids"][:, :2].copy(), "log_probs": stored["log_probs"][:, :3].copy()}
    save_arrays(stored | fewer, file)
    with pytest.raises(DataError, match=r"has the 2 likeliest tokens, and 00000000\.safetensors has others"):
        TeacherScores(tmp_path / "scores", TOKENIZER, temperature=1.0)


def test_scores_that_are_gone_while_they_are_read_are_told(tmp_path: Path) -> None:
    make_scores(tmp_path)
    scores = TeacherScores(tmp_path / "scores", TOKENIZER, temperature=1.0)
    (tmp_path / "scores" / "00000001.safetensors").unlink()
    with pytest.raises(DataError, match=r"00000001\.safetensors can't be read any more"):
        scores.of(QUESTIONS[1])
