"""A pass that fails in the middle leaves no trace once FSDP is at rest (runtime/fsdp_state.py): on 2 ranks, to the bit.

Where a CUDA graph is being recorded, nothing is computed, so that ranks which fail in different places have missed none
of each other's collectives. On a CPU collectives that do nothing stand for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime import rows as gathered_rows
from qlora_fsdp.runtime.fsdp_state import rest
from qlora_fsdp.runtime.rows import local_tensor
from qlora_fsdp.training.capture.passes import EagerPasses
from tests.helpers.failing import PLACES, Place, failing
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import gathered_adapter, settings, train_here

pytestmark = pytest.mark.distributed
KINDS = {
    "FULL_SHARD": [],
    "SHARD_GRAD_OP": ["fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "recomputed": ["memory=recompute"],
}
COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
Found = tuple[list[float], list[list[Tensor]], dict[str, Tensor]]


class Failure(RuntimeError):
    """What the passes fail with."""


def fail(*args: Any) -> None:
    raise Failure


@contextmanager
def without_collectives() -> Iterator[None]:
    """A context in which FSDP and the model gather and sum nothing, as in a recording."""
    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with (
        patch.multiple(dist, **dict.fromkeys(names, lambda *args, **options: None)),
        patch.object(gathered_rows, "_all_gather", lambda *args, **options: None),
    ):
        yield


def fail_once(model: TaskModel, compute: Callable[[], Any], place: Place, everywhere: bool) -> None:
    """Begin a pass which fails on rank 1 or on all ranks, and come to rest where it fails."""
    fails_here = everywhere or os.environ["RANK"] == "1"
    with nullcontext() if everywhere else without_collectives():
        if fails_here:
            with failing(model, place, fail), pytest.raises(Failure):
                compute()
            rest(model)
        else:
            compute()
    for param in model.parameters():
        param.grad = None  # a recording would not have computed any


def train_with_failures(cases: Mapping[Any, tuple[list[str], Place | None, bool]]) -> dict[Any, Found]:
    """Runs in which each micro-batch fails first. Their losses, the gradients of each step, and the adapters."""
    run, found = EagerPasses.run, {}
    for case, (argv, place, everywhere) in cases.items():
        gradients: list[list[Tensor]] = []

        def run_twice(
            passes: EagerPasses,
            batch: Batch,
            is_last: bool,
            place: Place | None = place,
            everywhere: bool = everywhere,
            gradients: list[list[Tensor]] = gradients,
        ) -> Tensor:
            if place is not None:
                fail_once(passes.model, lambda: run(passes, batch, is_last), place, everywhere)
            loss = run(passes, batch, is_last)
            gradients.append([local_tensor(p.grad).clone() for p in passes.model.parameters() if p.grad is not None])
            return loss

        with patch.object(EagerPasses, "run", run_twice):
            result = train_here(argv, gathered_adapter)
        found[case] = result.losses, gradients, result.inspected
    return found


@pytest.fixture(scope="module")
def world(checkpoint: Callable[..., Path], rows: Path) -> Callable[[], list[dict[Any, Found]]]:
    own = ["training.max_steps=3", "training.global_batch_size=2"]
    cases: dict[Any, tuple[list[str], Place | None, bool]] = {}
    for kind, more in KINDS.items():
        argv = settings(checkpoint("llama"), rows, *own, *more)
        cases[kind] = argv, None, False
        cases |= {(kind, place, everywhere): (argv, place, everywhere) for place in PLACES for everywhere in (0, 1)}
    return once(lambda: run_ranks(2, train_with_failures, cases))


@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_pass_computes_what_it_would_have(world, kind: str, place: Place, everywhere: bool):
    for found in world():
        losses, gradients, adapter = found[kind, place, everywhere]
        undisturbed, expected, same_adapter = found[kind]
        assert losses == undisturbed and len(losses) == 3
        assert len(gradients) == len(expected) == 3 and all(each[-1].abs().sum() > 0 for each in gradients)
        for mine, others in zip(gradients, expected, strict=True):
            assert len(mine) > 4 and all(map(torch.equal, mine, others)) and len(mine) == len(others)
        assert adapter.keys() == same_adapter.keys() and all(map(torch.equal, adapter.values(), same_adapter.values()))
