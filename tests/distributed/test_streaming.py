"""Streamed data: the same losses at any number of ranks, and a run that goes on where it stopped in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.lines import read_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_all

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
    windows = read_lines(tmp_path / "two" / "stream.jsonl")
    resumed = read_lines(tmp_path / "resumed" / "stream.jsonl")
    assert windows[0]["window"] == 0 < resumed[0]["window"] and resumed[0] in windows  # nothing before was tokenized
    assert 0 < resumed[0]["sequence"] <= STEP * 4 < resumed[1]["sequence"]
    assert "eval_loss" in json.loads((tmp_path / "two" / "summary.json").read_text())
