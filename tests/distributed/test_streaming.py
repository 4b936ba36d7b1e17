"""Streamed data: the same losses at any number of ranks, and a run that goes on where it stopped in it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.training.capture.passes import EagerPasses
from tests.helpers.lines import read_lines
from tests.helpers.ranks import Meeting, run_ranks
from tests.helpers.runs import settings, train_all, train_here
from tests.helpers.streams import NUM_SEQUENCES, stream

pytestmark = pytest.mark.distributed
NUM_STEPS, STEP = 6, 4


def test_one_and_two_ranks_and_a_resumed_run_give_the_same_losses(checkpoint: Callable, rows: Path, tmp_path: Path):
    def argv(name: str, num_ranks: int, *more: str) -> list[str]:
        return settings(
            checkpoint("llama"), rows, "data.streaming=true", "data.buffer_rows=20", f"data.eval_path={rows}",
            f"training.max_steps={NUM_STEPS}", f"training.micro_batch_size={4 // num_ranks}",
            f"run.folder={tmp_path / name}", "checkpoint.every_steps=2", *more,
        )  # fmt: skip

    resume = f"checkpoint.resume={tmp_path / 'two' / 'checkpoints' / f'step-{STEP:08}'}"
    one = run_ranks(1, train_all, {"one": argv("one", 1)})[0]["one"].losses
    two, other = run_ranks(2, train_all, {"two": argv("two", 2), "resumed": argv("resumed", 2, resume)})
    assert two["two"].losses == other["two"].losses == pytest.approx(one, abs=1e-5) and len(one) == NUM_STEPS
    assert two["resumed"].losses == two["two"].losses[STEP:]
    alone = run_ranks(1, train_all, {"alone": argv("alone", 1, resume)})[0]["alone"].losses
    assert alone == pytest.approx(one[STEP:], abs=1e-5)
    windows = read_lines(tmp_path / "two" / "stream.jsonl")
    resumed = read_lines(tmp_path / "resumed" / "stream.jsonl")
    assert windows[0]["window"] == 0 < resumed[0]["window"] and resumed[0] in windows  # nothing before was tokenized
    assert 0 < resumed[0]["sequence"] <= STEP * 4 < resumed[1]["sequence"]
    first = f"{resumed[0]['sequence']:012}.safetensors"  # taken from the run's files, whoever resumes, and kept again
    assert len({(tmp_path / name / "windows" / first).read_bytes() for name in ("two", "resumed", "alone")}) == 1
    assert "eval_loss" in json.loads((tmp_path / "two" / "summary.json").read_text())


def train_until_it_breaks(cases: Sequence[tuple[list[str], bool]]) -> list[str | None]:
    """Runs one after another, on request with passes queued ahead as where they are CUDA graphs; their errors."""
    errors: list[str | None] = []
    for argv, is_ahead in cases:
        try:
            with mock.patch.object(EagerPasses, "are_replayed", is_ahead):
                train_here(argv)
            errors.append(None)
        except DataError as error:
            errors.append(str(error))
    return errors


def test_a_run_whose_data_breaks_is_saved_and_goes_on(checkpoint: Callable, rows: Path, tmp_path: Path):
    """Without a checkpoint beforehand, as by default. The third window is the broken one, of 5 steps each."""
    lines = rows.read_text().splitlines()[:80]
    (tmp_path / "good.jsonl").write_text("\n".join(lines))
    (tmp_path / "broken.jsonl").write_text("\n".join([*lines[:50], "{broken", *lines[51:]]))

    def argv(name: str, data: str, *more: str) -> list[str]:
        own = ["run.overwrite=false", "data.streaming=true", "data.buffer_rows=20", "data.bad_rows=error"]
        own += [f"run.folder={tmp_path / name}", f"data.path={tmp_path / data}", "training.max_steps=13", *more]
        return settings(checkpoint("llama"), rows, *own, packing=False)

    repaired = "checkpoint.allow_changes=[data.path]"
    cases = [(argv("whole", "good.jsonl"), False)]
    for name, is_ahead in (("in_turn", False), ("ahead", True)):
        cases += [(argv(name, "broken.jsonl"), is_ahead), (argv(name, "good.jsonl", repaired), is_ahead)]
    one, other = run_ranks(2, train_until_it_breaks, cases)
    assert one == other and one[::2] == [None] * 3
    assert all("broken.jsonl:51" in error and error.endswith(" Step 9 is saved.") for error in one[1::2] if error)
    losses = [[line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in line]
              for name in ("whole", "in_turn", "ahead")]  # fmt: skip
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 13


def read_share(folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """For each case what this rank gets of a stream: its sequences, or the message that ends it."""
    found: list[Any] = []
    for case in cases:
        Meeting.new_port()
        processes = start_processes(60, use_cpu=True).for_thread()
        try:
            with mock.patch("qlora_fsdp.data.streams.window_maker.ROWS_A_READER", 7):
                data = stream([folder / name for name in case["paths"]], processes, **case["more"])
                found.append(_own_sequences(data, processes.rank, processes.num_ranks))
        except DataError as error:
            found.append(str(error))
        finally:
            stop_processes()
    return found


def _own_sequences(data: Any, rank: int, num_ranks: int) -> dict[str, Any]:
    problems = [(problem.kind, problem.num_rows, problem.examples) for problem in data.first_window.report.problems]
    sequences = {}
    for index in range(NUM_SEQUENCES):
        lengths = [*data.lengths_of(np.array([index])).tolist(), data.num_target_tokens(np.array([index]))]
        if index % 4 % num_ranks == rank:  # of a global batch of 4, in micro-batches of 1
            rows = data.rows_of(index)
            assert lengths == [sum(len(row) for row, _ in rows), sum(int(mask.sum()) for _, mask in rows)]
            sequences[index] = [(row.tolist(), mask.tolist()) for row, mask in rows]
        else:
            with pytest.raises(AssertionError, match="another rank"):
                data.rows_of(index)
    return {"sequences": sequences, "problems": problems}


def test_ranks_share_windows_and_their_errors(tmp_path: Path):
    """Files of several kinds, bad rows among them, and a mix: the same on three ranks as on one, in parts."""
    folder = tmp_path / "many"
    folder.mkdir()
    bad = {3: "{broken", 8: '{"no": "text"}', 11: "[]", 12: '{"no": 1}'}
    lines = [bad.get(n, json.dumps({"text": f"row {n} " + "x" * (n % 11)})) for n in range(30)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(("\n".join(lines[13:])).encode()))
    (tmp_path / "other.jsonl").write_text("\n".join(lines[20:]))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress("\n".join(lines * 40).encode())[:-30])
    (tmp_path / "late.jsonl").write_text("\n".join([*lines[13:], *lines[13:], "{broken"]))  # in the second window
    (tmp_path / "bad.jsonl").write_text('{"no": "text"}\n' * 45)  # more than two windows
    (tmp_path / "turns_bad.jsonl").write_text("\n".join(lines) + '\n{"no": "text"}' * 45)
    cases = [
        {"paths": ["many"], "more": {}},
        {"paths": ["many", "other.jsonl"], "more": {"weights": (1.0, 2.0)}},
        {"paths": ["turns_bad.jsonl"], "more": {}},
        {"paths": ["late.jsonl"], "more": {"strict": True}},
        {"paths": ["cut.jsonl.gz"], "more": {"buffer_rows": 5000}},
        {"paths": ["other.jsonl"], "more": {"vocab_size": 257}},
        {"paths": ["bad.jsonl"], "more": {}},
    ]
    (one,), three = run_ranks(1, read_share, tmp_path, cases), run_ranks(3, read_share, tmp_path, cases)
    for number in (0, 1, 2):
        assert [rank[number]["problems"] for rank in three] == [one[number]["problems"]] * 3
        together = {index: rows for rank in three for index, rows in rank[number]["sequences"].items()}
        assert together == one[number]["sequences"] and len(together) == NUM_SEQUENCES
        assert sum(len(rank[number]["sequences"]) for rank in three) == NUM_SEQUENCES  # each on one rank alone
    places = [example for _, _, examples in one[0]["problems"] for example in examples]
    assert {"a.jsonl:4", "a.jsonl:9", "a.jsonl:13"} <= set(re.findall(r"a\.jsonl:[0-9]+", " ".join(places)))
    said_of = {3: "late.jsonl:35", 4: "cut.jsonl.gz can't be read", 5: "has token 257", 6: "There is no usable row"}
    for number, said in said_of.items():
        messages = {rank[number] for rank in three}
        assert messages == {one[number]} and said in one[number]


def test_losses_are_those_of_the_cached_rows_in_the_same_order(checkpoint: Callable, rows: Path, tmp_path: Path):
    """A stream in windows of 10 rows on two ranks, and the same rows from the cache of a file in the stream's order."""
    model, more = checkpoint("llama"), [f"training.max_steps={NUM_STEPS}", "training.seed=5"]
    streaming = ["data.streaming=true", "data.buffer_rows=10", f"run.folder={tmp_path / 'streamed'}"]
    streamed = run_ranks(2, train_all, {0: settings(model, rows, *more, *streaming, packing=False)})[0][0].losses
    seeds = [int(np.random.SeedSequence([5, window]).generate_state(1)[0]) for window in range(3)]
    shuffled = [10 * window + np.random.default_rng(seed).permutation(10) for window, seed in enumerate(seeds)]
    lines = [rows.read_text().splitlines()[place] for place in np.concatenate(shuffled)[: 4 * NUM_STEPS]]
    epoch = np.random.default_rng([5, 0]).permutation(len(lines))  # the order in which cached rows are trained on
    file = [""] * len(lines)
    for line, place in zip(lines, epoch, strict=True):
        file[place] = line
    (tmp_path / "ordered.jsonl").write_text("\n".join(file))
    cached = settings(
        model, rows, *more, f"data.path={tmp_path / 'ordered.jsonl'}", f"run.folder={tmp_path / 'c'}", packing=False
    )
    assert streamed == pytest.approx(run_ranks(1, train_all, {0: cached})[0][0].losses, abs=1e-5)
