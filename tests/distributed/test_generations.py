"""tracking.num_generations: what a model in training writes at evaluations is what transformers and PEFT write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch

from tests.helpers.lines import read_lines, write_lines
from tests.helpers.preferences import write_pairs
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
NUM_TOKENS = 8


# Ranks that share the model write all texts together, others each their share. Of pairs, the chosen answer stands
# beside the completion. Rows of 3 ranks do not divide evenly, and groups of scales lie across them.
CASES = {
    "FULL_SHARD": (2, "llama", ["quant=none"]),
    "NO_SHARD": (2, "llama", ["quant=none", "fsdp.sharding_strategy=NO_SHARD"]),
    "pairs": (2, "llama", ["quant=none", "fsdp.sharding_strategy=NO_SHARD", "task=preference"]),
    "groups of ranks": (4, "llama", ["quant=none", "fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.hybrid_shard_size=2"]),
    "layers that stay gathered": (2, "llama", ["fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "uneven rows": (3, "llama", ["quant.bnb_4bit_use_double_quant=true"]),
    "tied embeddings": (2, "qwen2", []),
    "embeddings in int8": (2, "llama", ["quant.embeddings=int8"]),
    "quantized experts": (2, "qwen3_moe", ["quant.bnb_4bit_use_double_quant=true", "lora.target_modules=[q_proj]"]),
    "experts that ranks can't share": (3, "qwen3_moe", ["quant=none", "lora.target_modules=[q_proj]"]),
    "DoRA": (2, "llama", ["quant=none", "lora.use_dora=true"]),
}
BY_PASSES = {"experts that ranks can't share": "4 experts can't be shared by 3 ranks", "DoRA": "need whole weights"}


@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_stock_generate(
    case: str, checkpoint: Callable[..., Path], rows: Path, tmp_path: Path
):
    num_ranks, family, more = CASES[case]
    rows = write_pairs(tmp_path / "pairs.jsonl") if "task=preference" in more else rows
    model, folder = checkpoint(family, torch.float32), tmp_path / "run"
    argv = settings(model, rows, "training.precision=float32", "training.max_steps=6")
    argv += ["data.eval_fraction=0.1", "training.eval_every_steps=3", "training.learning_rate=0.02"]
    argv += ["tracking.num_generations=3", f"tracking.generation_tokens={NUM_TOKENS}", f"run.folder={folder}", *more]
    argv += [f"training.global_batch_size={num_ranks}"]
    run_ranks(num_ranks, train_all, {"run": argv})
    lines = read_lines(folder / "generations.jsonl")
    assert [line["step"] for line in lines] == [0] * 3 + [3] * 3 + [6] * 3
    expected = {tuple(json.loads(row).values())[:2] for row in rows.read_text().splitlines()}
    assert all((line["prompt"], line["reference"]) in expected for line in lines)

    stock = load_stock(model, load_config(argv).quant)
    assert [line["completion"] for line in lines[:3]] == [complete(stock, line["prompt"]) for line in lines[:3]]
    trained = peft.PeftModel.from_pretrained(stock, folder / "adapter")
    assert [line["completion"] for line in lines[6:]] == [complete(trained, line["prompt"]) for line in lines[6:]]
    assert lines[0]["completion"] != lines[6]["completion"]
    page = (folder / "report.html").read_text()
    assert "<h2>What the model wrote</h2>" in page and "<th>step 0</th><th>step 6</th>" in page
    said = (folder / "train.log").read_text()
    assert ("a pass through the model" in said) is (case in BY_PASSES) and BY_PASSES.get(case, "") in said


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
