"""Frozen weights that GPUs read from one another's memory: runs are the same to the bit as those that gather them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.experts import make_experts
from tests.helpers.peers import BothWays, assert_same, make_layers, train_both_ways
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import settings

NUM_RANKS = torch.cuda.device_count()
needs_several = pytest.mark.skipif(NUM_RANKS < 2, reason="one GPU gathers nothing")
NUM_STEPS, NUM_LAYERS = 6, 4
CASES: dict[str, list[str]] = {
    "freed": ["fsdp.reshard_after_forward=true"],
    "kept": ["fsdp.reshard_after_forward=false"],
    "launched": ["fsdp.reshard_after_forward=true", "compute.cuda_graph=false"],
    "HYBRID_SHARD": ["fsdp.sharding_strategy=HYBRID_SHARD", "fsdp.reshard_after_forward=true"],
    "recomputed": ["fsdp.reshard_after_forward=true", "memory=recompute"],
    "int8": ["fsdp.reshard_after_forward=true", "quant=int8"],
    "int8 embeddings": ["fsdp.reshard_after_forward=true", "quant.embeddings=int8"],
    "experts": ["fsdp.reshard_after_forward=true"],
}


@pytest.fixture(scope="module")
def runs(rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs")
    own = [
        "training.deterministic=true",
        f"training.max_steps={NUM_STEPS}",
        f"training.global_batch_size={4 * NUM_RANKS}",
    ]
    own += ["data.eval_fraction=0.1", "training.eval_every_steps=2"]
    experts = make_experts("mixtral", folder / "mixtral")
    layers = make_layers(folder / "llama", NUM_LAYERS)
    models = {case: experts if case == "experts" else layers for case in CASES}
    cases = {case: settings(models[case], rows, *own, *more) for case, more in CASES.items()}
    return once(lambda: run_ranks(NUM_RANKS, train_both_ways, cases, gpu=True))


@needs_several
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_to_the_bit(runs: Callable[[], list[dict[str, BothWays]]], case: str):
    for found in runs():
        assert_same(found[case], NUM_STEPS)
        assert found[case].num_codes > 0
        assert found[case].num_tables == (2 if case == "int8 embeddings" else 1)
        assert found[case].holds_head == (case == "kept")
        has_own_buffers = case in ("kept", "experts")  # this model of experts has two layers, as many as there are sets
        assert (found[case].num_codes == found[case].num_buffers) == has_own_buffers
