"""Rows that a run keeps for the reports of merges: which these are, and that files of others are looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.data.answers import PairedRows
from qlora_fsdp.data.report_rows import ReportRows, choose_rows, read_report_rows, write_report_rows
from qlora_fsdp.data.sequences import RandomRows, SequenceSettings, make_sequences

VOCAB = 50


def sequences(rows, packing: bool, max_length: int = 2048):
    settings = SequenceSettings(max_length, pad_token_id=0, packing=packing, seed=0)
    return make_sequences(rows, np.arange(len(rows.lengths)), settings)


def test_rows_are_chosen_evenly_and_cut():
    rows = RandomRows(num_rows=101, length=700, vocab_size=VOCAB, seed=0)
    chosen = choose_rows(sequences(rows, packing=False), num_rows=5)
    assert len(chosen) == 5
    for (tokens, is_target), row in zip(chosen, (0, 25, 50, 75, 100), strict=True):
        np.testing.assert_array_equal(tokens, rows.read(row)[0][0][:512])
        assert is_target.sum() == 64 and is_target[1] and is_target[511]


def test_the_same_rows_are_chosen_of_packed_ones_and_the_chosen_answer_of_a_pair():
    short = RandomRows(num_rows=40, length=30, vocab_size=VOCAB, seed=0)
    apart = choose_rows(sequences(short, packing=False))
    packed = choose_rows(sequences(short, packing=True))
    pairs = choose_rows(sequences(PairedRows(short), packing=True), num_rows=20)
    assert len(apart) == len(packed) == 32
    for (tokens, _), (others, _) in zip(apart, packed, strict=True):
        np.testing.assert_array_equal(tokens, others)
    for number, (tokens, _) in enumerate(pairs):
        np.testing.assert_array_equal(tokens, short.read(2 * number)[0][0])


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, ReportRows]:
    rows = choose_rows(sequences(RandomRows(num_rows=4, length=20, vocab_size=VOCAB, seed=0), packing=False))
    return tmp_path / "report_rows.safetensors", ReportRows(rows, are_held_out=True)


def test_rows_are_read_as_they_were_written(kept):
    file, rows = kept
    digest = write_report_rows(rows, file)
    found = read_report_rows(file, digest, VOCAB)
    assert found.are_held_out
    for one, other in zip(rows.rows, found.rows, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.full(80, VOCAB, np.int32)},
        {"tokens": np.full(80, -1, np.int32)},
        {"tokens": np.zeros(80, np.float32)},
        {"tokens": np.zeros((2, 40), np.int32)},
        {"lengths": np.array([20, 20, 20, 21], np.int32)},
        {"lengths": np.array([40, -20, 40, 20], np.int32)},
        {"lengths": np.zeros(0, np.int32)},
    ],
)
def test_files_of_others_are_looked_at(kept, change):
    file, rows = kept
    write_report_rows(rows, file)
    save_file(load_file(file) | change, file)
    with pytest.raises(DataError, match="holds no rows of tokens of this model"):
        read_report_rows(file, digest_file(file), VOCAB)


def test_other_files_are_named(kept, tmp_path: Path):
    file, rows = kept
    digest = write_report_rows(rows, file)
    with pytest.raises(DataError, match="has no rows of this adapter's run"):
        read_report_rows(tmp_path / "none", digest, VOCAB)
    with pytest.raises(DataError, match="has no rows of this adapter's run"):
        read_report_rows(file, "0" * 64, VOCAB)
    file.write_bytes(b"0" * 100)
    with pytest.raises(DataError, match="can't be read"):
        read_report_rows(file, digest_file(file), VOCAB)
    save_file({"tokens": np.zeros(1, np.int32)}, file)
    with pytest.raises(DataError, match="can't be read"):
        read_report_rows(file, digest_file(file), VOCAB)
