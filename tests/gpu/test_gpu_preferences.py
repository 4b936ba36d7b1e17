"""Preferences in bfloat16: the reference rounds as the model does, so the first loss is that of a margin of zero."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.helpers.preferences import write_judged, write_pairs
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import train_all

NUM_RANKS = torch.cuda.device_count()
# Large enough that products which are computed in another way round in another way.
MODEL = ["model=llama3-8b", "model.weights=random", "model.config.num_hidden_layers=8", "model.config.vocab_size=32000"]
COMMON = [
    "task=preference",
    "fsdp=full_shard",
    "model.tokenizer_path=bytes",
    "training.max_length=512",
    "training.max_steps=4",
    "training.micro_batch_size=4",
    f"training.global_batch_size={8 * NUM_RANKS}",
    "training.learning_rate=1e-5",
    "optim.lr_scheduler_type=constant",
    "optim.warmup_ratio=0",
    "training.deterministic=true",  # or gradients are added in any order, and the second step differs
]
KTO = "preference.loss=kto"
CASES = {
    "rows of one length": ["data=random", "training.max_length=1024"],
    "many short rows": [],
    "padded": ["training.packing=false"],
    "recomputed": ["memory=recompute"],
    "kto": [KTO],
}
FIRST = {"kto": 0.5}  # 1 - sigmoid(0); of the others -log sigmoid(0)


def make_runs(folder: Path) -> dict[tuple[str, bool], list[str]]:
    """The settings of each case, with the reference's log-probabilities precomputed and not."""
    pairs, judged = write_pairs(folder / "pairs.jsonl", 600), write_judged(folder / "judged.jsonl", 600)
    runs = {}
    for name, more in CASES.items():
        for is_early in (True, False):
            own = folder / f"{name} {is_early}".replace(" ", "-")
            data = [] if "data=random" in more else [f"data.path={judged if KTO in more else pairs}"]
            places = [f"run.folder={own}", f"data.cache_folder={folder / 'cache'}"]
            early = f"preference.precompute={str(is_early).lower()}"
            runs[name, is_early] = [*MODEL, *COMMON, *data, *places, early, *more]
    return runs


def losses_of(argv: list[str]) -> list[float]:
    (folder,) = (text.removeprefix("run.folder=") for text in argv if text.startswith("run.folder="))
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[float]]:
    """The loss of every step of each case."""
    runs = make_runs(tmp_path_factory.mktemp("preferences"))
    run_ranks(NUM_RANKS, train_all, runs, gpu=True)
    return {case: losses_of(argv) for case, argv in runs.items()}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_first_loss_is_that_of_no_margin(losses, name: str, is_early: bool):
    assert losses[name, is_early][0] == pytest.approx(FIRST.get(name, math.log(2)), abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_when_the_reference_is_computed_changes_no_loss(losses, name: str):
    assert losses[name, True] == losses[name, False]
    assert losses[name, True][-1] != losses[name, True][0]
