"""A sweep through the real command: Ctrl-C lets the jobs save, and the same command goes on with what is left."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.status import show_status
from tests.cli.launch import SHORT_STEPS, Launch
from tests.helpers.lines import read_lines

pytestmark = pytest.mark.distributed
SWEEP = [
    *("-m", "model=tiny", "data=random", "training.max_length=64", "lora.r=2,4", *SHORT_STEPS),
    *("launch.num_processes=1", "launch.parallel=2"),
]


def lines_of(job: Path) -> list[dict[str, Any]]:
    return read_lines(job / "metrics.jsonl")


@pytest.mark.slow
def test_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    first = Launch(tmp_path, "python", *SWEEP, "training.max_steps=100000")
    jobs = [first.run_folder / name for name in ("lora.r=2", "lora.r=4")]
    for job in jobs:
        first.wait_for(lambda job=job: len(lines_of(job)) > 1, "steps")
    assert show_status([first.run_folder]).count("running") == 2
    first.process.send_signal(signal.SIGINT)
    assert first.finish() == 130
    assert "The same command goes on" in first.errors[0] and first.output.count("Step ") == 2
    saved = [json.loads((job / "summary.json").read_text())["error"].split()[4] for job in jobs]
    last = max(map(int, saved)) + 2
    allowed = [f"training.max_steps={last}", "checkpoint.allow_changes=[training.max_steps]"]
    second = Launch(tmp_path, "python", *SWEEP, *allowed)
    assert second.finish() == 0
    best = second.output.partition("Next, with the best:\n")[2].splitlines()[0].split()
    assert best[:2] == ["qlora-fsdp", "chat"] and best[2].partition("=")[2] in [str(job / "adapter") for job in jobs]
    for job in jobs:
        assert [line["step"] for line in lines_of(job)] == list(range(1, last + 1)), "no step is done twice"
        assert (job / "adapter" / "adapter_model.safetensors").exists()
        assert "Going on from step" in (job / "train.log").read_text()
    assert show_status([first.run_folder]).count("finished") == 2
