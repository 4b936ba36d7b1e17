"""A run is judged by any figure of its evaluations, and a sweep's runs by one another: through the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.cli.launch import run_forked
from tests.helpers.answers import write_prompts
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import read_lines, write_lines

# What the answers get: less each time the run is asked for held-out prompts, which are all of those with a 9.
FALLING = """
seen = []

def falling(prompts, completions, **kwargs):
    if "9" in prompts[0]:
        seen.append(None)
    return [1.0 - 0.1 * len(seen) + 0.01 * len(text) for text in completions]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("judged") / "base", torch.float32)
    byte_tokenizer().save_pretrained(folder)
    return folder


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in read_lines(folder / "metrics.jsonl") if "eval_loss" in line}


def test_a_reward_decides_where_a_run_stops_and_which_adapter_it_leaves(base: Path, tmp_path: Path) -> None:
    (tmp_path / "falling.py").write_text(FALLING)
    write_prompts(tmp_path / "prompts.jsonl")
    write_lines(tmp_path / "held.jsonl", [{"prompt": "9 plus 9", "weight": 1}])
    settings = ["task=grpo", f"model.path={base}", "data=prompts.jsonl", "data.eval_path=held.jsonl"]
    settings += ["reward.functions=[falling.py:falling]", "rollout.num_generations=2"]
    settings += ["rollout.max_completion_length=4", "rollout.num_generations_eval=2", "training.max_length=48"]
    settings += ["training.global_batch_size=2", "training.max_steps=8", "training.eval_every_steps=1"]
    settings += ["checkpoint.every_steps=1", "checkpoint.keep_best=1", "checkpoint.best_at_end=true", "run.name=run"]
    settings += ["training.early_stopping_patience=3", f"data.cache_folder={tmp_path}"]
    unknown = "training.metric_for_best_model=eval_rewards"
    code, printed = run_forked(tmp_path, "train", *settings, unknown)
    assert code == 2, printed
    assert "training.metric_for_best_model=rewards is no figure of this run's evaluations, which have loss" in printed
    metric = "training.metric_for_best_model=reward"
    code, printed = run_forked(tmp_path, "train", *settings, metric, "run.overwrite=true")
    assert code == 0, printed
    folder = tmp_path / "outputs" / "run"
    rewards = {step: line["eval_reward"] for step, line in evaluations(folder).items()}
    assert list(rewards) == [0, 1, 2, 3], "three without a higher one"
    assert "Stopped early: 3 evaluations without a higher reward." in printed
    summary = json.loads((folder / "summary.json").read_text())
    best = max((step for step in rewards if step > 0), key=lambda step: rewards[step])
    assert (summary["adapter_step"], summary["metric"]) == (best, rewards[best])
    assert f"The adapter is that of step {best}: its evaluation reward {rewards[best]:.4f} is higher" in printed
    kept = folder / "checkpoints" / f"step-{best:08d}" / "adapter" / "adapter_model.safetensors"
    assert (folder / "adapter" / kept.name).read_bytes() == kept.read_bytes()


def test_a_pruner_of_optuna_ends_the_worse_run_of_a_sweep(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    answer = "the cat sat on the mat and the dog sat on the log"
    write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{n}: ", "completion": answer} for n in range(40)])
    settings = [f"model.path={base}", "data=rows.jsonl", "training.max_length=256", "run.name=sweep"]
    settings += ["training.max_steps=6", "training.global_batch_size=1", "training.eval_every_steps=2"]
    settings += ["data.eval_fraction=0.2", "launch.num_processes=1", f"data.cache_folder={tmp_path}"]
    pruner = ["training.pruner=MedianPruner", "training.pruner_kwargs={n_startup_trials: 1}"]
    code, printed = run_forked(tmp_path, "train", "-m", *settings, *pruner, "training.learning_rate=0.001,10")
    assert code == 0, printed
    folder = tmp_path / "outputs" / "sweep"
    good, bad = (folder / f"training.learning_rate={rate}" for rate in ("0.001", "10"))
    assert list(evaluations(good)) == [0, 2, 4, 6] and list(evaluations(bad)) == [0, 2]
    stopped = json.loads((bad / "summary.json").read_text())
    assert (stopped["status"], stopped["steps"]) == ("finished", 2)
    assert stopped["stopped_early"].startswith("Optuna's MedianPruner")
    assert (bad / "adapter" / "adapter_model.safetensors").exists()
    assert (folder / "best").resolve() == good.resolve()
    assert f"Next, with the best:\n  qlora-fsdp generate adapter={good}" in printed
    rows = [line for line in printed.splitlines() if "/adapter" in line and line.endswith("/adapter")]
    assert "stopped early" in rows[1] and rows[0].startswith("*") and "finished" in rows[0]
    wrong = ["training.pruner=MedianPruner", "training.pruner_kwargs={startup: 1}", "run.name=other"]
    code, printed = run_forked(tmp_path, "train", *settings, *wrong)
    assert code == 2, printed
    assert "unexpected keyword argument 'startup'. Set training.pruner_kwargs=" in printed
