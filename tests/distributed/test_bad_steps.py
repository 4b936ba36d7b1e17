"""Steps whose gradient must not be used, on 2 ranks: skipped, gone back from, or the end; and the best checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import qlora_fsdp.training.step as step
from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.records.run_state import checkpoint_folders
from tests.helpers.lines import read_lines
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import settings, train_here

pytestmark = pytest.mark.distributed
ADAPTER = Path("adapter/adapter_model.safetensors")


def train_with_nan(runs: Sequence[tuple[list[str], int | None]]) -> list[str | None]:
    """Runs one after another; in each the gradient norm is NaN once, at the so-many-th step taken. Their errors."""
    errors: list[str | None] = []
    clip = step.clip_gradients
    for argv, bad in runs:
        count = 0

        def clip_or_nan(params: Any, max_norm: float, bad: int | None = bad) -> torch.Tensor:
            nonlocal count
            norm, count = clip(params, max_norm), count + 1
            return torch.full_like(norm, math.nan) if count - 1 == bad else norm

        step.clip_gradients = clip_or_nan
        try:
            train_here(argv)
            errors.append(None)
        except TrainingError as error:
            errors.append(str(error))
        finally:
            step.clip_gradients = clip
    return errors


@pytest.fixture(scope="module")
def world(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bad")

    def argv(name: str, *more: str) -> list[str]:
        own = [f"run.folder={folder / name}", "run.overwrite=false", "training.max_steps=5", *more]
        return settings(checkpoint("llama"), rows, *own)

    best = ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_best=2", "data.eval_fraction=0.2"]
    runs = [
        (argv("skip", "training.on_bad_step=skip"), 2),
        (argv("stop"), 2),
        (argv("stop", "training.on_bad_step=skip"), 0),
        (argv("rollback", "training.on_bad_step=rollback", "checkpoint.every_steps=2"), 4),
        (argv("best", *best, "training.eval_every_steps=1", "training.learning_rate=0.1"), None),
    ]

    @once
    def run() -> list[str | None]:
        return run_ranks(2, train_with_nan, runs)[0]

    return folder, run


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "metrics.jsonl")


def test_skipped_step_leaves_the_weights_and_its_rows_behind(world):
    folder, run = world
    assert run()[0] is None
    lines = lines_of(folder / "skip")
    assert [line.get("skipped", False) for line in lines] == [False, False, True, False, False]
    assert lines[2]["grad_norm"] is None and json.loads((folder / "skip" / "summary.json").read_text())["steps"] == 5
    bad = json.loads((folder / "skip" / "bad_steps" / "step-00000003.json").read_text())
    assert bad["step"] == 3 and "gradient norm nan" in bad["reason"] and len(bad["sequences"]) == 4
    assert sum(entry["loss"] for entry in bad["sequences"]) == pytest.approx(lines[2]["loss"], rel=1e-6)
    assert all(len(row) > 5 for entry in bad["sequences"] for row in entry["rows"])


def test_stopped_run_is_saved_and_goes_on_as_the_one_that_skipped(world):
    folder, run = world
    errors = run()
    assert errors[1] is not None and "Step 3: loss" in errors[1] and "Step 2 is saved. Look at these rows" in errors[1]
    assert errors[2] is None
    assert (folder / "stop" / ADAPTER).read_bytes() == (folder / "skip" / ADAPTER).read_bytes()


def test_rollback_goes_back_to_the_newest_checkpoint(world):
    folder, run = world
    assert run()[3] is None
    newest = checkpoint_folders(folder / "rollback" / "checkpoints")[-1]
    assert newest.name == "step-00000004"
    assert (folder / "rollback" / ADAPTER).read_bytes() == (newest / ADAPTER).read_bytes()


def test_best_checkpoints_stay(world):
    folder, run = world
    assert run()[4] is None
    losses = {line["step"]: line["eval_loss"] for line in lines_of(folder / "best") if "eval_loss" in line}
    known = sorted((losses[step], step) for step in (1, 2, 3))  # that of step 4 came after the last save
    expected = {4, *(step for _, step in known[:2])}
    found = {int(path.name[-8:]) for path in checkpoint_folders(folder / "best" / "checkpoints")}
    assert found == expected
