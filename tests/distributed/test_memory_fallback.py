"""A rank that is short of memory keeps fewer activations from then on, alone: no other rank notices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.memory.policy import Policy
from qlora_fsdp.model.activations import MemoryFallback
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.training.capture import passes
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Trained, settings, train_here

pytestmark = pytest.mark.distributed
FALLS_BACK_AT = (2, 5, 6, 9, 10, 11)  # micro-batches, two a step; two layers, each of which has three steps to go


def train_short_of_memory(argv: list[str], rank_short: int | None) -> tuple[Trained, list[Policy]]:
    """A run in which one rank falls back before these micro-batches; the policies of its layers at the end."""
    policies, num_micro_batches, set_gradient_sync = [Policy.none], 0, passes.set_gradient_sync
    fallback: MemoryFallback | None = None

    def fall_back(model: TaskModel, enabled: bool) -> None:
        nonlocal fallback, num_micro_batches
        fallback = fallback or MemoryFallback(model.layers, [Policy.none] * len(model.layers))
        if rank_short == int(os.environ["RANK"]) and num_micro_batches in FALLS_BACK_AT:
            fallback()
        num_micro_batches += 1
        policies[:] = fallback.policies
        set_gradient_sync(model, enabled)

    passes.set_gradient_sync = fall_back
    try:
        return train_here(argv), policies
    finally:
        passes.set_gradient_sync = set_gradient_sync


def train_each(runs: dict[Any, tuple[list[str], int | None]]) -> dict[Any, tuple[Trained, list[Policy]]]:
    return {case: train_short_of_memory(*run) for case, run in runs.items()}


def test_losses_stay_the_same_bit_for_bit(checkpoint: Callable[..., Path], rows: Path) -> None:
    few = ["training.max_steps=8", "training.global_batch_size=8", "training.micro_batch_size=2"]
    argv = settings(checkpoint("llama"), rows, *few)
    ways = {"gathered once": "fsdp.reshard_after_forward=false", "gathered twice": "fsdp.reshard_after_forward=true"}
    runs = {(way, short): ([*argv, setting], short) for way, setting in ways.items() for short in (None, 1)}
    ranks = run_ranks(2, train_each, runs)
    for way, short in runs:
        for rank, found in enumerate(ranks):
            trained, policies = found[way, short]
            assert len(trained.losses) == 8 and trained.losses == found[way, None][0].losses
            assert set(policies) == {Policy.offload if rank == short else Policy.none}
