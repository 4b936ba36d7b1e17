"""`qlora-fsdp train lora.start=FOLDER` on two ranks after a first run: refused, interrupted, and resumed.

What is refused and resumed goes through the command as a user types it; the runs before are on forked ranks.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.launch import ForkedLaunch, Launch, check_message_alone
from tests.helpers.lines import read_lines

pytestmark = pytest.mark.distributed
RANDOM = ["data=random", "training.max_length=32"]
TWO_RANKS = "launch.num_processes=2"


def test_a_run_trains_on_from_another_and_resumes_without_it(tmp_path: Path) -> None:
    model = ["model=tiny", "model.config.num_hidden_layers=1", "lora.r=4"]
    first = ForkedLaunch(tmp_path / "sft", 2, *model, *RANDOM, "training.max_steps=1")
    assert first.finish() == 0, first.output
    adapter = tmp_path / "sft" / "run" / "adapter"
    on = [f"lora.start={adapter}", *RANDOM, "training.max_steps=100000"]

    refused = Launch(tmp_path / "refused", "qlora-fsdp", *on, TWO_RANKS, "lora.r=16", "lora.lora_alpha=8")
    assert refused.finish() == 2
    assert "2 settings can't be used" in refused.errors[0] and "lora.r=16 contradicts lora.start=" in refused.errors[0]
    assert "importing torch" not in refused.output and not refused.run_folder.exists()

    second = ForkedLaunch(tmp_path / "dpo", 2, *on)
    second.wait_for_steps()
    second.rank(0).send_signal(signal.SIGTERM)
    assert second.finish() == 128 + signal.SIGTERM, second.output
    assert second.summary["started_from"]["adapter"] == str(adapter)
    num_steps = len(read_lines(second.run_folder / "metrics.jsonl"))

    shutil.rmtree(adapter)
    third = Launch(tmp_path / "dpo", "qlora-fsdp", *on, TWO_RANKS)
    third.wait_for_steps(num_steps + 2)
    third.process.send_signal(signal.SIGTERM)
    assert third.finish() == 128 + signal.SIGTERM, third.output
    check_message_alone(third, "Interrupted by SIGTERM. Step ")
    assert "Going on from step" in third.output
    anew = Launch(tmp_path / "dpo", "qlora-fsdp", *on, TWO_RANKS, "run.overwrite=true")
    assert anew.finish() == 2 and "holds no adapter" in anew.errors[0]
