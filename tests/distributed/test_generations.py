"""tracking.num_generations: what the sharded model writes at evaluations is what transformers and PEFT write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.lines import read_lines, write_lines
from tests.helpers.preferences import write_pairs
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
NUM_TOKENS = 8


# Together, a pass for every token; alone, in slots. Of pairs, the chosen answer stands beside the completion.
@pytest.mark.parametrize(
    ("sharding", "task"), [("FULL_SHARD", "causal_lm"), ("NO_SHARD", "causal_lm"), ("NO_SHARD", "preference")]
)
def test_completions_are_those_of_stock_generate(
    sharding: str, task: str, checkpoint: Callable[..., Path], rows: Path, tmp_path: Path
):
    rows = write_pairs(tmp_path / "pairs.jsonl") if task == "preference" else rows
    model, folder = checkpoint("llama", torch.float32), tmp_path / "run"
    argv = settings(model, rows, "quant=none", "training.precision=float32", "training.max_steps=6")
    argv += ["data.eval_fraction=0.1", "training.eval_every_steps=3", "training.learning_rate=0.02"]
    argv += ["tracking.num_generations=3", f"tracking.generation_tokens={NUM_TOKENS}", f"run.folder={folder}"]
    argv += [f"fsdp.sharding_strategy={sharding}", f"task={task}"]
    run_ranks(2, train_all, {"run": argv})
    lines = read_lines(folder / "generations.jsonl")
    assert [line["step"] for line in lines] == [0] * 3 + [3] * 3 + [6] * 3
    expected = {tuple(json.loads(row).values())[:2] for row in rows.read_text().splitlines()}
    assert all((line["prompt"], line["reference"]) in expected for line in lines)

    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert [line["completion"] for line in lines[:3]] == [complete(stock, line["prompt"]) for line in lines[:3]]
    trained = peft.PeftModel.from_pretrained(stock, folder / "adapter")
    assert [line["completion"] for line in lines[6:]] == [complete(trained, line["prompt"]) for line in lines[6:]]
    assert lines[0]["completion"] != lines[6]["completion"]
    page = (folder / "report.html").read_text()
    assert "<h2>What the model wrote</h2>" in page and "<th>step 0</th><th>step 6</th>" in page


def test_completions_end_with_a_table_of_positions(checkpoint: Callable[..., Path], tmp_path: Path):
    """The model has embeddings of 256 positions, and a prompt takes 250 of them."""
    lines = [{"prompt": letter * 249, "completion": " b"} for letter in "abcd"]
    rows, folder = write_lines(tmp_path / "rows.jsonl", lines), tmp_path / "run"
    argv = settings(checkpoint("opt", torch.float32), rows, "training.max_steps=1", packing=False)
    argv += ["training.max_length=256", "data.eval_fraction=0.5", "tracking.num_generations=1", f"run.folder={folder}"]
    run_ranks(1, train_all, {"run": argv})
    assert [len(line["completion"]) <= 6 for line in read_lines(folder / "generations.jsonl")] == [True, True]


def complete(model: torch.nn.Module, prompt: str) -> str:
    """By transformers' own greedy search, with its cache."""
    ids = torch.tensor([[256, *prompt.encode()]])
    output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=257)
    tokens = [token for token in output[0, ids.shape[1] :].tolist() if token < 256]
    return bytes(tokens).decode(errors="replace")
