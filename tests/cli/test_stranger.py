"""Five commands from a file of chats to a conversation, as somebody types them who has read nothing but their output.

Training goes through the launcher, in new processes; the others run in processes that have the libraries already.
The model is SmolLM2-135M-Instruct, out of a Python package (scripts/make_smollm2.py); without it this is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launch import ROOT, SCRIPT, child_environment, run_forked
from tests.helpers.lines import read_lines
from tests.helpers.smollm2 import needs_smollm2

pytestmark = [pytest.mark.distributed, pytest.mark.slow, needs_smollm2]
NUM_CHATS = 200
RUN = ["model.path=smollm2", "data=chats.jsonl", "training.max_length=128"]
FEW_STEPS = ["training.max_steps=4", "training.learning_rate=1e-3", "launch.num_processes=2", "run.name=first"]
FEW_STEPS += ["training.global_batch_size=2"]
QUESTION = "What does `textwrap.dedent(text)` do?"


def type_in(folder: Path, *command: str, text: str = "") -> str:
    """Runs a command to its end, and returns what it printed."""
    if command[0] == "train":
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
        done = subprocess.run([sys.executable, str(SCRIPT), *command], cwd=folder, env=child_environment(), **both)
        exit_code, printed = done.returncode, done.stdout
    else:
        exit_code, printed = run_forked(folder, *command, text=text)
    assert exit_code == 0, printed
    assert "Traceback" not in printed and "Error" not in printed, printed
    return printed


def test_five_commands_from_a_file_of_chats_to_a_conversation(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "smollm2").symlink_to(smollm2)
    chats = (ROOT / "demo" / "chats.jsonl").read_text().splitlines()[:NUM_CHATS]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats) + "\n")

    planned = type_in(tmp_path, "preflight", *RUN, "hardware=1x24gib")
    assert planned.startswith("Fits: ")
    assert f"qlora-fsdp preview {' '.join(RUN)}\n" in planned and f"qlora-fsdp train {' '.join(RUN)}\n" in planned

    shown = type_in(tmp_path, "preview", *RUN, "rows=3")
    answer = json.loads(chats[0])["messages"][-1]["content"]
    assert f"[[{answer}<|im_end|>" in shown and f"{NUM_CHATS} rows read, {NUM_CHATS} used" in shown
    assert shown.endswith(f"Next: qlora-fsdp train {' '.join(RUN)}\n")

    trained = type_in(tmp_path, "train", *RUN, *FEW_STEPS)
    adapter = tmp_path / "outputs" / "first" / "adapter"
    for command in ("chat", "merge"):
        assert f"qlora-fsdp {command} adapter={adapter}" in trained
    assert (adapter / "adapter_model.safetensors").is_file() and (adapter.parent / "report.html").is_file()
    steps = read_lines(adapter.parent / "metrics.jsonl")
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    assert len(losses) == 4 and losses[-1] < losses[0] < 6, "a model that knows English, and learns"

    said = type_in(tmp_path, "chat", f"adapter={adapter}", "max_new_tokens=12", text=f"{QUESTION}\n/exit\n")
    assert len(said.strip().splitlines()[-1]) > 5, said

    merged = type_in(tmp_path, "merge", f"adapter={adapter}", "out=merged")
    assert "qlora-fsdp chat model.path=merged" in merged
    assert (tmp_path / "merged" / "config.json").is_file()
