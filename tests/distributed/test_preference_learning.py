"""A real chat model learns by DPO which of two summaries is a function's, of functions it was not trained on.

That `evaluate` finds the same figures is tested with small models (test_preference_use.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.lines import read_lines, write_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train_all
from tests.helpers.smollm2 import needs_smollm2

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from make_docstring_preferences import write_preferences

NUM_STEPS, NUM_TRAINING, NUM_EVAL = 6, 72, 30
LENGTH = "training.max_length=128"
# Short pairs, of which ten fill a step: half of the demo's tokens, at twice its rate
SHORT_STEPS = ["training.global_batch_size=2", "training.micro_batch_size=2", "training.learning_rate=1e-3"]
pytestmark = [pytest.mark.distributed, pytest.mark.slow, needs_smollm2]


def learn(folder: Path, model: Path) -> None:
    """Steps as those of `make demo-preference`, on one rank: each of two would dequantize all weights."""
    own = [f"data.{name}={folder}/{file}" for name, file in (("path", "train.jsonl"), ("eval_path", "eval.jsonl"))]
    places = [f"model.path={model}", f"data.cache_folder={folder}/cache", f"run.folder={folder}/run", *own]
    train_all({"dpo": ["experiment=demo_preference", f"training.max_steps={NUM_STEPS}", LENGTH, *SHORT_STEPS, *places]})


def keep_the_shortest(file: Path, num_pairs: int) -> None:
    """Of the pairs in a file those that take the fewest letters."""
    pairs = sorted(read_lines(file), key=lambda pair: 2 * len(pair["prompt"]) + len(pair["chosen"] + pair["rejected"]))
    write_lines(file, pairs[:num_pairs])


def test_a_chat_model_learns_which_summary_is_a_functions(tmp_path: Path, smollm2: Path) -> None:
    write_preferences(tmp_path, 5 * NUM_TRAINING, 5 * NUM_EVAL)
    for name, num_pairs in (("train", NUM_TRAINING), ("eval", NUM_EVAL)):
        keep_the_shortest(tmp_path / f"{name}.jsonl", num_pairs)
    trained, held_out = (read_lines(tmp_path / f"{name}.jsonl") for name in ("train", "eval"))
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held_out}
    assert not {row["chosen"] for row in trained} & {row["chosen"] for row in held_out}
    run_ranks(1, learn, tmp_path, smollm2, timeout_seconds=1800)
    before, after = (line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line)
    assert before["eval_rewards/margins"] == 0
    assert after["eval_rewards/accuracies"] >= 0.7  # chance is 0.5, and gives as many of 30 once in 47 tries
