"""Small things that people met, through the real command: bytes of names, 8-bit state on two ranks, AutoPeft."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import SCRIPT, child_environment, run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base, and rows in a folder with an umlaut."""
    folder = tmp_path_factory.mktemp("friction")
    make_checkpoint("llama", folder / "base", torch.float32)
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "größe").mkdir()
    rows = [{"prompt": f"{number}: ", "completion": "the cat sat on the mat"} for number in range(24)]
    write_lines(folder / "größe" / "zeilen.jsonl", rows)
    return folder


def test_8_bit_state_and_losses_are_the_same_on_two_ranks_and_peft_finds_the_base(folder: Path) -> None:
    """Of 64 x 64 elements, bitsandbytes' threshold, each of two ranks has half. The base is a relative path."""
    typed = ["model.path=base", "data=größe/zeilen.jsonl", "training.max_length=128", "training.max_steps=4"]
    typed += ["optim=adamw_8bit", "lora.r=64", "training.global_batch_size=2", "training.learning_rate=1e-3"]
    typed += [f"data.cache_folder={folder}", "training.micro_batch_size=1"]
    losses = []
    for number in ("1", "2"):
        code, printed = run_forked(folder, "train", *typed, f"launch.num_processes={number}", f"run.name={number}")
        assert code == 0, printed
        lines = read_lines(folder / "outputs" / number / "metrics.jsonl")
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "outputs" / "2" / "adapter")
    assert loaded.get_base_model().config.hidden_size == 64


def test_a_name_with_an_umlaut_is_read_in_any_locale(folder: Path) -> None:
    asked = subprocess.run(
        [sys.executable, str(SCRIPT), "preview", "model.path=base", "data=größe/zeilen.jsonl", "rows=1"],
        env=child_environment() | {"LC_ALL": "C", "LANG": "C"},
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert "24 rows read" in asked.stdout
