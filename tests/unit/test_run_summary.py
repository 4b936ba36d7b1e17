"""summary.json, whichever way a run ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from qlora_fsdp.common.errors import Interrupted, TrainingError
from qlora_fsdp.records.run_summary import RunSummary


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (TrainingError("The loss is NaN."), "failed", "The loss is NaN."),
        (ValueError("a bug"), "failed", "ValueError('a bug')"),
        (Interrupted(signal.SIGTERM, "Step 2 is saved."), "interrupted", "Interrupted by SIGTERM. Step 2 is saved."),
    ],
)
def test_a_failure_is_written_with_the_figures_so_far(tmp_path: Path, error: Exception, status: str, text: str):
    summary = RunSummary(num_ranks=2)
    summary.failed(error)  # before there is a folder
    summary.open(tmp_path, None)
    summary.loaded({"load_seconds": 1.0}, setup_seconds=2.0)
    summary.failed(error)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {
        "status": status,
        "num_ranks": 2,
        "load_seconds": 1.0,
        "setup_seconds": 2.0,
        "error": text,
    }


def test_a_finished_run(tmp_path: Path):
    summary = RunSummary(num_ranks=1)
    summary.open(tmp_path, None)
    for _ in range(2):  # the checkpoint is verified, and loaded
        with summary.resuming():
            pass
    summary.trained({"written": 3})
    summary.measured(None, {"host_gib": 1.0})
    summary.finished({"steps": 5}, seconds=7.0)
    summary.write()
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == summary.figures and 0 <= found.pop("resume_seconds") < 1
    assert list(found) == ["status", "num_ranks", "checkpoints", "memory", "steps", "seconds"]
    assert found["status"] == "finished" and found["memory"] == {"predicted": None, "measured": {"host_gib": 1.0}}
