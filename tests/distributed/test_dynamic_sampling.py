"""Prompts whose answers all have one reward: replaced by others, said after ten steps, and the run ends early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.answers import answer_settings, lines_of, train_and_record
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train_here

pytestmark = pytest.mark.distributed
# Answers to even prompts are all worth the same.
HALF = """
def half(prompts, completion_ids, **kwargs):
    return [0.0 if int(p.split()[0]) % 2 == 0 else ids[0] / 100 for p, ids in zip(prompts, completion_ids)]

def alike(completions, **kwargs):
    return [0.5 for _ in completions]
"""


def settings(folder: Path, name: str, function: str, *more: str) -> list[str]:
    if not (folder / "model").exists():
        make_checkpoint("llama", folder / "model")
    (folder / "half.py").write_text(HALF)
    reward = [f"reward.functions=[{folder / 'half.py'}:{function}]", "reward.weights=null"]
    return answer_settings(folder / "model", folder, name, *reward, "training.max_steps=3", *more)


def prompts_of(argv: list[str], folder: Path, name: str) -> list[set[str]]:
    rows = read_lines(folder / "runs" / name / "generations.jsonl")
    return [{row["prompt"] for row in rows if row["step"] == step} for step in range(3)]


def test_prompts_without_spread_are_replaced(tmp_path: Path) -> None:
    plain = settings(tmp_path, "plain", "half")
    once = settings(tmp_path, "once", "half", "rollout.dynamic_sampling=1")
    often = settings(tmp_path, "often", "half", "rollout.dynamic_sampling=6")
    two = settings(tmp_path, "two", "half", "rollout.dynamic_sampling=6", "fsdp=no_shard")
    found = run_ranks(1, train_and_record, {"plain": plain, "once": once, "often": often})[0]
    run_ranks(2, train_here, two)
    parts = {argv[5]: [line["frac_reward_zero_std"] for line in lines_of(argv)] for argv in (plain, once, often, two)}
    plain_parts, once_parts, often_parts, two_parts = parts.values()
    assert sum(plain_parts) > sum(once_parts) >= sum(often_parts) == 0.0 == sum(two_parts)
    assert all("num_replaced_prompts" not in line for line in lines_of(plain))
    replaced = [line["num_replaced_prompts"] for line in lines_of(often)]
    assert sum(replaced) >= sum(4 * part for part in plain_parts) > 0
    assert len(found["often"]) > len(found["once"]) > len(found["plain"]) == 3
    for prompts in prompts_of(often, tmp_path, "often"):
        assert len(prompts) == 4 and all(int(prompt.split()[0]) % 2 == 1 for prompt in prompts)
    assert prompts_of(often, tmp_path, "often") == prompts_of(two, tmp_path, "two"), "on any ranks"


def test_rewards_that_are_all_alike_are_said_and_end_the_run(tmp_path: Path) -> None:
    tiny = ["training.global_batch_size=1", "rollout.num_generations=2", "rollout.max_completion_length=2"]
    tiny += ["training.max_steps=14", "data.eval_fraction=0.2", "training.eval_every_steps=4"]
    argv = settings(tmp_path, "alike", "alike", *tiny, "training.early_stopping_patience=3")
    run_ranks(1, train_here, argv)
    log = (tmp_path / "runs" / "alike" / "train.log").read_text()
    assert log.count("For 10 steps all answers to a prompt have had the same reward") == 1
    assert "rollout.dynamic_sampling=3" in log
    assert "Stopped early: 3 evaluations without a lower loss." in log
    assert len(lines_of(argv)) == 12
