"""The loss of an int8 head in pieces of the vocabulary, as the commands of plans and runs have it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import ForkedLaunch, run_forked
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines, write_lines

SMALL = ["quant.embeddings=int8", "optim=adamw_8bit"]


def test_70b_fits_two_gpus_of_24_gib_with_its_parameters_on_them(tmp_path: Path) -> None:
    typed = ["model=llama3-70b", "hardware=2x24gib", *SMALL]
    code, printed = run_forked(tmp_path, "preflight", *typed)
    assert code == 0 and printed.startswith("Fits: "), printed
    assert "the head's loss in pieces of the vocabulary" in printed
    code, printed = run_forked(tmp_path, "preflight", *typed, "memory.head_in_pieces=false")
    assert code == 3 and printed.startswith("Does not fit: "), printed


def test_losses_are_those_of_the_whole_head(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base", torch.float32)
    byte_tokenizer().save_pretrained(base)
    rows = [{"prompt": f"{n}: ", "completion": "the cat sat on the mat and the dog on the log"} for n in range(24)]
    write_lines(tmp_path / "rows.jsonl", rows)
    typed = [f"model.path={base}", f"data={tmp_path / 'rows.jsonl'}", "training.max_length=128", "training.max_steps=4"]
    typed += ["quant.embeddings=int8", "training.global_batch_size=2", f"data.cache_folder={tmp_path}"]
    found = []
    for value in ("true", "false"):
        run = ForkedLaunch(tmp_path / value, 2, *typed, f"memory.head_in_pieces={value}")
        assert run.finish() == 0, run.output
        assert ("the head's loss in pieces of the vocabulary" in run.output) == (value == "true")
        lines = read_lines(run.run_folder / "metrics.jsonl")
        found.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(found[0]) == 4
    for pieces, whole in zip(*found, strict=True):
        assert pieces == pytest.approx(whole, rel=1e-5)
