"""What is done with a run of task=grpo: `evaluate` finds what training found, and the adapter writes texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from qlora_fsdp import evaluate, generate
from tests.helpers.answers import answer_settings, write_prompts
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by, train_here

pytestmark = pytest.mark.distributed
MORE = ["training.max_steps=2", "reward.pass_threshold=0.01", "rollout.num_generations_eval=3"]


def train_and_use(argv: Sequence[str], evaluation: Sequence[str], generation: Sequence[str]) -> tuple[str, str]:
    train_here(argv)
    return printed_by(evaluate.main, evaluation), printed_by(generate.main, generation)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluate_finds_what_training_found(tmp_path: Path, num_ranks: int) -> None:
    make_checkpoint("llama", tmp_path / "model")
    held_out = write_prompts(tmp_path / "held_out.jsonl", 5)
    argv = answer_settings(tmp_path / "model", tmp_path, "use", *MORE, f"data.eval_path={held_out}")
    folder = Path(load_config(argv).run.folder)
    own = [text for text in argv if text.startswith(("reward.", "rollout.", "training.max_length", "model.tokenizer"))]
    adapter = f"adapter={folder / 'adapter'}"
    evaluation = [adapter, f"data.path={held_out}", *own]
    generation = [adapter, "prompt=1 plus", "max_new_tokens=4", "raw=true"]
    printed, text = run_ranks(num_ranks, train_and_use, argv, evaluation, generation)[0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-1]
    found = json.loads(printed)
    names = [name.removeprefix("eval_") for name in last if name.startswith("eval_")]
    names = [name for name in names if name not in ("loss", "seconds")]
    assert {"reward", "pass@1", "pass@3", "completions/mean_length", "rewards/vowels/std"} <= set(names)
    assert {name: found[name] for name in names} == pytest.approx({name: last[f"eval_{name}"] for name in names})
    assert found["num_prompts"] == 5 and 0 < found["pass@1"] < found["pass@3"]
    assert text.strip()
