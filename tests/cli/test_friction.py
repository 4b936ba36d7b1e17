"""Small things that people met, through the real command: bytes of names, 8-bit state on two ranks, AutoPeft."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import SCRIPT, ForkedLaunch, child_environment, run_forked
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
    for num_ranks in (1, 2):
        run = ForkedLaunch(folder, num_ranks, *typed, f"run.folder=outputs/{num_ranks}")
        assert run.finish() == 0, run.output
        lines = read_lines(folder / "outputs" / str(num_ranks) / "metrics.jsonl")
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


def shown_on(columns: int, folder: Path, *command: str) -> list[str]:
    """The lines of a command on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *command],
        env=child_environment() | {"COLUMNS": str(columns), "TERM": "dumb"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # Linux's way of saying that nobody writes any more
            break
        if not read:
            break
        text += read
    os.close(ours)
    process.wait()
    return text.decode().replace("\r\n", "\n").split("\n")


def test_sentences_break_between_words_and_a_sweeps_table_fits_a_narrow_terminal(folder: Path) -> None:
    lines = shown_on(60, folder, "train", "model=tiny", "data=nowhere.jsonl", "training.max_steps=0")
    assert "Error: 2 settings can't be used:" in lines
    assert len(lines) > 8 and all(len(line) <= 60 for line in lines), lines
    jobs = [{"overrides": {"lora.r": rank}, "folder": f"sweep/lora.r={rank}"} for rank in ("8", "16")]
    for job in jobs:
        run = folder / job["folder"]
        (run / "adapter").mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 4, "final_loss": 1.25}))
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    for columns, has_loss in ((120, True), (30, False)):
        table = [line for line in shown_on(columns, folder, "report", "sweep") if "  " in line]
        assert len(table) == 3 and all(len(line) <= columns for line in table), table
        assert ("final_loss" in table[0]) is has_loss, table


def test_text_that_is_split_is_not_said_to_be_cut(folder: Path) -> None:
    write_lines(folder / "long.jsonl", [{"text": "the cat sat on the mat " * 20}] * 3)
    typed = ["model.path=base", f"data.cache_folder={folder}", "training.max_length=64", "data.deduplicate=false"]
    code, printed = run_forked(folder, "preview", *typed, "data=long.jsonl", "rows=0")
    assert code == 0 and "3 rows split (longer than training.max_length; all of it is used)" in printed, printed
    assert " cut" not in printed, printed


def test_loss_on_all_is_proposed_only_where_rows_have_more_tokens(folder: Path) -> None:
    """Rows are cut to two tokens, of which the second is the only target."""
    write_lines(folder / "letters.jsonl", [{"text": f"{number}"} for number in range(8)])
    typed = ["train", "model.path=base", "data=letters.jsonl", f"data.cache_folder={folder}", "training.max_steps=1"]
    code, printed = run_forked(folder, *typed, "training.max_length=2", "run.name=letters")
    assert code == 2, printed
    assert "attention has nothing to learn. Set training.max_length higher, or give rows with" in printed, printed


def leave_little_room() -> None:
    """In a process of its own: every disk has room for 30,000 bytes."""
    used = shutil.disk_usage("/")._replace(free=30_000)
    setattr(shutil, "disk_usage", lambda path: used)  # noqa: B010  # mypy would have the assignment typed


def test_little_room_is_told_in_figures_that_differ_from_zero(folder: Path) -> None:
    typed = ["model.path=base", "data=größe/zeilen.jsonl", f"data.cache_folder={folder}", "training.max_steps=1"]
    code, printed = run_forked(folder, "train", *typed, "run.name=full", preexec=leave_little_room)
    assert code == 2, printed
    room, needed = re.search(
        r"outputs/full has room for (\S+) MiB, and the adapter takes (\S+)\. Free", printed
    ).groups()
    assert 0 < float(room) < float(needed) < 1
