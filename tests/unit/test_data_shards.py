"""Tokenizing that is broken off goes on where it was, and rows are cut to any length when they are loaded."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.helpers.full_disk import small_disk
from tests.helpers.one_process import one_process

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, TrainingConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data import tokenize_source, workers
from qlora_fsdp.data.cut import MAY_SPLIT, WITH_BEFORE, CutSettings, FlatRows, cut_rows
from qlora_fsdp.data.row import NO_TARGET, SAME_ANSWERS, SPLIT, TOO_LONG
from qlora_fsdp.data.run_data import PreparedData, prepare_data
from qlora_fsdp.data.sequences import Sequences
from qlora_fsdp.data.shards import find_bounds
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
NUM_ROWS = 200
BAD = 7  # the row that is none


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_source, "ROWS_A_PROCESS", 10)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n} ", "completion": "x" * (1 + n % 40)}) for n in range(1, NUM_ROWS + 1)]
    file.write_text("\n".join([*lines[:BAD], "{", *lines[BAD:]]))
    return file


def prepare(rows: Path, cache: Path, max_length: int = 64, **data: Any) -> PreparedData[Sequences]:
    config = Config(
        data=DataConfig(path=str(rows), cache_folder=str(cache), **data), training=TrainingConfig(max_length=max_length)
    )
    return prepare_data(DataSpec.of(config), TOKENIZER, one_process(), 259)


def all_rows(prepared: PreparedData[Sequences]) -> list[tuple[list[int], list[bool]]]:
    found = prepared.train.rows
    parts = (part for row in range(len(found.lengths)) for part in found.read(row))
    return [(tokens.tolist(), is_target.tolist()) for tokens, is_target in parts]


def watch_tokenizing(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[int], None]) -> Seen:
    """Calls `act` with the number of a process's calls so far before each batch; the rows of all processes' batches."""
    own: list[int] = []
    seen = Seen(folder / f"seen-{time.monotonic_ns()}.txt")
    whole = RowTokenizer.whole

    def watched(self: RowTokenizer, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        act(len(own))
        own.append(len(batch["row"]))
        with seen.file.open("a") as stream:
            stream.write(f"{own[-1]}\n")
        return whole(self, batch)

    monkeypatch.setattr(RowTokenizer, "whole", watched)
    return seen


@dataclass(frozen=True)
class Seen:
    """The rows of each batch, which the processes that tokenize have written to a file, a line each."""

    file: Path

    def rows(self) -> list[int]:
        return [int(line) for line in self.file.read_text().splitlines()]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def prepare_in_fork(rows: Path, cache: Path) -> None:
    gc.freeze()  # what is garbage of other tests here may belong to threads that the fork has not
    prepare(rows, cache, num_proc=2)


def test_what_was_tokenized_before_a_kill_is_used(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    expected = prepare(rows, tmp_path / "other")

    def hold(num_calls: int) -> None:
        if num_calls == 5:
            (tmp_path / f"held-{os.getpid()}").touch()
            signal.pause()

    with monkeypatch.context() as patch:
        watch_tokenizing(patch, tmp_path, hold)
        process = multiprocessing.get_context("fork").Process(target=prepare_in_fork, args=(rows, cache))
        process.start()
        wait_for(lambda: len(list(tmp_path.glob("held-*"))) == 2)
        workers = psutil.Process(process.pid).children()
        process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == 3 and not alive  # two that tokenize, and the one for foreign files
    (work,) = cache.glob(".*.parts")
    assert len(list(work.glob("*.arrow"))) == 1 + 2 * 5 and len(list(work.glob("*.tmp"))) == 2

    monkeypatch.setattr(tokenize_source, "read_rows", None)
    seen = watch_tokenizing(monkeypatch, tmp_path, lambda num_calls: None)
    bounds = np.load(work / "bounds.npy")
    again = prepare(rows, cache, num_proc=1)
    assert len(seen.rows()) == len(bounds) - 1 - 10 and sum(seen.rows()) < NUM_ROWS
    assert all_rows(again) == all_rows(expected)
    assert str(again.report.sources[0]) == str(expected.report.sources[0])
    assert "1 row left out (not JSON): rows.jsonl:8" in str(again.report)
    assert {path.suffix for path in cache.iterdir()} <= {"", ".lock", ".npy"}  # no work folder, nothing half written


def test_a_worker_that_is_killed_is_told(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(num_calls: int) -> None:
        if num_calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        watch_tokenizing(patch, tmp_path, end)
        with pytest.raises(DataError, match=r"process that tokenizes was killed.*set data\.num_proc lower"):
            prepare(rows, tmp_path / "cache", num_proc=2)
    assert not multiprocessing.active_children()
    assert prepare(rows, tmp_path / "cache", num_proc=2).report.num_rows == NUM_ROWS


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "600k") as folder:
        yield folder


def test_a_full_disk_costs_what_is_being_written(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"{n} " * 500}) for n in range(100, 200)))
    message = r"data\.cache_folder=.*No space left on device.*What is tokenized is kept"
    with pytest.raises(DataError, match=message):
        prepare(rows, disk, max_length=4096, num_proc=1)
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
    seen = watch_tokenizing(monkeypatch, tmp_path, lambda num_calls: None)
    assert prepare(rows, disk, max_length=4096, num_proc=1).report.num_rows == 100
    assert 0 < sum(seen.rows()) < 100


def test_what_nobody_goes_on_with_is_removed_after_a_week(tmp_path: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    key = "0123456789abcdef" * 2
    for name in (f".{key}.0.parts", f".{key}.abc.tmp", "a.parts"):
        (cache / name).mkdir()
        (cache / name / "000000.arrow").touch()
        os.utime(cache / name, (0, 0))
    fresh = cache / f".{key[::-1]}.0.parts"
    fresh.mkdir()
    prepare(rows, cache)
    assert {path.name for path in cache.iterdir() if path.suffix in (".parts", ".tmp")} == {"a.parts", fresh.name}


def test_a_work_folder_of_somebody_else_is_refused(tmp_path: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    prepare(rows, cache)
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    entry.rename(tmp_path / "entry")
    (tmp_path / "elsewhere").mkdir()
    tokenize_source.find_work(entry).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is no folder of this user's: remove it"):
        prepare(rows, cache)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_shards_have_about_the_same_bytes() -> None:
    num_bytes = np.random.default_rng(0).integers(1, 5000, 100_000)
    bounds = find_bounds(num_bytes, may_divide=True)
    parts = np.add.reduceat(num_bytes, bounds[:-1])
    assert bounds[0] == 0 and bounds[-1] == len(num_bytes) and np.all(np.diff(bounds) > 0)
    assert len(parts) == 64 and np.ptp(parts) < 2 * 5000
    assert find_bounds(num_bytes, may_divide=False).tolist() == [0, len(num_bytes)]
    assert find_bounds(np.array([9, 9, 9]), may_divide=True).tolist() == [0, 1, 2, 3]
    assert find_bounds(np.array([], dtype=np.int64), may_divide=True).tolist() == [0]


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for text, expected in (("max 100000\n", 64), ("150000 100000\n", 2), ("", 64)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(workers, "CPU_LIMIT", tmp_path / "cpu.max")
        assert workers.num_cores() == expected


@pytest.mark.parametrize("bad_rows", [BadRows.skip, BadRows.truncate])
def test_another_length_needs_no_tokenizing(
    bad_rows: BadRows, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows and the report are those of a cache of its own, also where long rows are not kept whole."""
    prepare(rows, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_source, "KEPT_TOKENS", 16)
        prepare(rows, tmp_path / "beginnings", 16)
    for max_length, kept in ((8, "beginnings"), (16, "beginnings"), (20, "whole"), (200, "whole")):
        alone = prepare(rows, tmp_path / f"{max_length}", max_length, bad_rows=bad_rows, num_proc=1)
        with monkeypatch.context() as patch:
            patch.setattr(tokenize_source, "read_rows", None)
            if kept == "beginnings":
                patch.setattr(tokenize_source, "KEPT_TOKENS", 16)
            shared = prepare(rows, tmp_path / kept, max_length, bad_rows=bad_rows)
        assert all_rows(shared) == all_rows(alone) and str(shared.report) == str(alone.report)
        assert alone.train.rows.lengths.max() <= max_length
    assert "cut" not in str(shared.report)


def cut_one_by_one(
    flat: FlatRows, settings: CutSettings
) -> tuple[list[tuple[int, int, int, int]], dict[str, list[int]]]:
    """What `cut_rows` does, a row at a time as one would explain it: pieces, and the rows of each kind of problem."""
    groups: list[list[int]] = []
    for row, flags in enumerate(flat.flags.tolist()):
        groups.append([]) if not flags & WITH_BEFORE else None
        groups[-1].append(row)
    found: list[tuple[int, int, int, int]] = []
    problems: dict[str, list[int]] = {}
    for group in groups:
        pieces, heads, long = [], [], [row for row in group if flat.lengths[row] > settings.max_length]
        for row in group:
            start, end = flat.starts[row : row + 2].tolist()
            heads.append(flat.tokens[start : min(end, start + settings.max_length)].tolist())
            splits = row in long and flat.flags[row] & MAY_SPLIT
            cuts = range(start, end, settings.max_length) if splits else [start]
            for first in cuts:
                last = min(end, first + settings.max_length)
                count = int(flat.is_target[first + 1 : last].sum())
                pieces.append((row, first, last, min(count, 1) if settings.is_compared else count))
        pieces = [piece for piece in pieces if piece[3]]
        told = long[0] if long else group[0]
        if long and not settings.truncates:
            problems.setdefault(TOO_LONG, []).append(told)
        elif {piece[0] for piece in pieces} != set(group):
            problems.setdefault(NO_TARGET, []).append(told)
        elif long and settings.is_paired and heads[0] == heads[1]:
            problems.setdefault(SAME_ANSWERS, []).append(told)
        else:
            found += pieces
            if long:
                loses_tokens = any(not flat.flags[row] & MAY_SPLIT for row in long)
                problems.setdefault(TOO_LONG if loses_tokens else SPLIT, []).append(told)
    return found, problems


@pytest.mark.parametrize("kind", ["text", "answers", "pairs", "mixed"])
@pytest.mark.parametrize("truncates", [True, False])
def test_rows_are_cut_as_one_by_one(kind: str, truncates: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_rows = 2 * int(rng.integers(1, 8))
        lengths = rng.integers(1, 13, num_rows)
        starts = np.cumsum([0, *lengths])
        is_target = rng.random(starts[-1]) < rng.choice([0.1, 0.9])
        is_target[starts[:-1]] = False
        flags = {
            "text": np.full(num_rows, MAY_SPLIT),
            "answers": np.zeros(num_rows),
            "pairs": np.arange(num_rows) % 2 * WITH_BEFORE,
            "mixed": rng.integers(0, 2, num_rows) * MAY_SPLIT,
        }[kind]
        settings = CutSettings(int(rng.integers(2, 9)), truncates, kind == "pairs", kind == "pairs")
        counts = np.add.reduceat(is_target, starts[:-1], dtype=np.int32)
        flat = FlatRows(
            rng.integers(0, 2, starts[-1], dtype=np.int32),
            is_target,
            starts,
            np.minimum(counts, 1) if settings.is_compared else counts,
            flags.astype(np.uint8),
        )
        expected, problems = cut_one_by_one(flat, settings)
        pieces = cut_rows(flat, settings)
        if pieces is None:
            assert [piece[0] for piece in expected] == list(range(num_rows)) and not problems
            continue
        columns = (pieces.rows, pieces.starts, pieces.ends, pieces.num_targets)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
        told: dict[str, list[int]] = {}
        for problem in pieces.problems:
            told[problem.kind] = sorted([*told.get(problem.kind, []), *problem.rows.tolist()])
        assert told == problems
