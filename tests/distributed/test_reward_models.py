"""Reward models of task=grpo: an adapter of task=reward on the same base gives what stock PEFT gives with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from qlora_fsdp import evaluate
from qlora_fsdp.training.answers.reward_models import RewardModels
from tests.helpers.answers import answer_settings, lines_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.preferences import write_pairs
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.runs import printed_by, settings, train_here

pytestmark = pytest.mark.distributed
Scored = list[tuple[list[list[int]], list[float]]]
TARGETS = "lora.target_modules=[q_proj,up_proj]"  # of the reward model; the run adapts all linear layers
WORLDS = {1: [], 2: ["training.packing=false", "training.micro_batch_size=3"]}


def train_and_score(argv: Sequence[str]) -> Scored:
    """A run on this rank, and what its reward model was asked and has answered in every step."""
    found: Scored = []
    whole = RewardModels.score

    def score(self: RewardModels, questions: Any, completions: Any) -> Any:
        rewards = whole(self, questions, completions)
        pairs = zip(questions, completions, strict=True)
        found.append(([[*asked.tokens, *written.tokens] for asked, written in pairs], rewards[:, 0].tolist()))
        return rewards

    RewardModels.score = score  # type: ignore[method-assign]
    try:
        train_here(argv)
    finally:
        RewardModels.score = whole  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter of task=reward on it, and another base of the same shapes."""
    folder = tmp_path_factory.mktemp("reward-models")
    make_checkpoint("llama", folder / "model")
    rows = write_pairs(folder / "pairs.jsonl", 20)
    own = ["task=reward", "quant=none", f"run.folder={folder / 'judge'}", "training.max_steps=3", TARGETS]
    own += ["lora.r=4", "lora.lora_alpha=12", "training.learning_rate=1e-2"]
    argv = settings(folder / "model", rows, *own, packing=False)
    run_ranks(1, train_here, [text for text in argv if text != "lora.r=8"])
    return folder


def grpo(folder: Path, name: str, *more: str) -> list[str]:
    models = f"reward.models=[{folder / 'judge' / 'adapter'}]"
    argv = answer_settings(folder / "model", folder, name, "quant=none", "training.max_steps=2", models, *more)
    return [text for text in argv if not text.startswith("reward.weights")] + ["reward.weights=[1,0.5,2]"]


def test_rewards_are_those_of_stock_peft(folder: Path) -> None:
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(base, folder / "judge" / "adapter").eval()
    by_world = {n: run_ranks(n, train_and_score, grpo(folder, str(n), *more))[0] for n, more in WORLDS.items()}
    for num_ranks, found in by_world.items():
        assert len(found) == 2
        for texts, rewards in found:
            with torch.no_grad():
                expected = [float(judge(input_ids=torch.tensor([text])).logits[0, 0]) for text in texts]
            assert len(set(expected)) > 8
            assert rewards == pytest.approx(expected, abs=1e-5, rel=1e-5), num_ranks
        figures = lines_of(grpo(folder, str(num_ranks)))
        assert figures[0]["rewards/judge/mean"] == pytest.approx(sum(found[0][1]) / len(found[0][1]))
    assert by_world[1][0] == (by_world[2][0][0], pytest.approx(by_world[2][0][1], abs=1e-5)), "any ranks and layout"


def test_evaluate_asks_reward_models_too(folder: Path) -> None:
    argv = grpo(folder, "used", f"data.eval_path={folder / 'prompts.jsonl'}", "rollout.num_generations_eval=2")
    run_ranks(1, train_here, argv)
    run_folder = folder / "runs" / "used"
    own = [text for text in argv if text.startswith(("reward.", "rollout.", "training.max_length", "data.path"))]
    printed = run_ranks(2, printed_by, evaluate.main, [f"adapter={run_folder / 'adapter'}", *own])[0]
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("reward", "rewards/judge/mean", "rewards/judge/std"):
        assert json.loads(printed)[name] == pytest.approx(last[f"eval_{name}"], abs=1e-5)


def test_what_cannot_be_switched_is_refused(folder: Path) -> None:
    make_checkpoint("llama", folder / "other", seed=7)
    for name, more, told in (
        ("base", [f"model.path={folder / 'other'}"], "holds other weights than those that reward.models="),
        ("places", ["lora.target_modules=[k_proj]"], "Set lora.target_modules to the layers that it adapts, or more"),
    ):
        with pytest.raises(RanksFailed, match=told):
            run_ranks(1, train_here, grpo(folder, name, *more))
