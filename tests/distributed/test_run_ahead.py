"""A step's passes that are queued before the figures of the step before are read change nothing: on 2 ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from qlora_fsdp.training.capture.passes import EagerPasses
from qlora_fsdp.training.step import StepRunner
from tests.distributed.test_bad_steps import ADAPTER, train_with_nan
from tests.helpers.lines import read_lines
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import settings

pytestmark = pytest.mark.distributed
Runs = Mapping[str, tuple[list[str], int | None]]
Found = dict[str, tuple[str | None, int]]
# What comes between steps, the step whose gradient norm is NaN, and how many of 7 steps' passes are queued ahead: not
# the first step's, and none over an evaluation, a checkpoint or a way back.
BETWEEN = ["data.eval_fraction=0.03", "training.eval_every_steps=4", "checkpoint.every_steps=3"]
CASES: dict[str, tuple[list[str], int, int]] = {
    "skip": ([*BETWEEN, "lora.lora_dropout=0.2", "training.on_bad_step=skip"], 2, 3),
    "stop": ([], 2, 3),
    "rollback": (["training.on_bad_step=rollback", "checkpoint.every_steps=2"], 5, 0),
}
CHECKPOINT = "checkpoint_seconds"
KEPT = ["step", "loss", "grad_norm", "eval_loss", "skipped"]


class Order:
    """Counts the passes that begin before the figures of the step before are read."""

    def __init__(self) -> None:
        self.is_unread, self.num_ahead = False, 0
        self._run_passes, self._update = StepRunner.run_passes, StepRunner.update

    def run_passes(self, runner: StepRunner, *args: Any) -> Any:
        self.num_ahead += self.is_unread
        return self._run_passes(runner, *args)

    def update(self, runner: StepRunner, *args: Any) -> Callable[[], Any]:
        wait, self.is_unread = self._update(runner, *args), True

        def read() -> Any:
            self.is_unread = False
            return wait()

        return read


def train_both(runs: Sequence[Runs]) -> list[Found]:
    """The runs' errors and how many passes were queued ahead, first as a CPU has it, and then as if it had graphs."""
    found: list[Found] = []
    for is_ahead, each in enumerate(runs):
        found.append({})
        for name, run in each.items():
            order = Order()
            with (
                patch.object(StepRunner, "run_passes", lambda *args, order=order: order.run_passes(*args)),
                patch.object(StepRunner, "update", lambda *args, order=order: order.update(*args)),
                patch.object(EagerPasses, "are_replayed", bool(is_ahead)),
            ):
                (error,) = train_with_nan([run])
            found[-1][name] = error, order.num_ahead
    return found


@pytest.fixture(scope="module")
def world(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ahead")

    def runs(kind: str) -> Runs:
        own = ["run.overwrite=false", "training.max_steps=7"]
        return {
            name: (settings(checkpoint("llama"), rows, *own, f"run.folder={folder / kind / name}", *more), bad)
            for name, (more, bad, _) in CASES.items()
        }

    return folder, once(lambda: run_ranks(2, train_both, [runs("in_turn"), runs("ahead")])[0])


@pytest.mark.parametrize("name", CASES)
def test_running_ahead_changes_no_bit(world, name: str):
    folder, run = world
    (error, none_ahead), (same_error, num_ahead) = (found[name] for found in run())
    assert none_ahead == 0 and num_ahead == CASES[name][2]
    in_turn, ahead = folder / "in_turn" / name, folder / "ahead" / name
    # A checkpoint's line comes when its files are written, beside the steps, and so at any place among theirs.
    lines = [[line for line in read_lines(at / "metrics.jsonl") if CHECKPOINT not in line] for at in (in_turn, ahead)]
    kept = [[{key: line.get(key) for key in KEPT} for line in each] for each in lines]
    assert kept[0] == kept[1] and len(kept[0]) >= 2
    if name == "stop":
        assert error is not None and error.replace(str(in_turn), str(ahead)) == same_error
        files = sorted((in_turn / "checkpoints").rglob("*.safetensors"))
    else:
        assert error is None and same_error is None
        files = [in_turn / ADAPTER]
    assert files and all(file.read_bytes() == (ahead / file.relative_to(in_turn)).read_bytes() for file in files)
