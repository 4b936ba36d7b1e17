"""Packed rows through torch's varlen kernels, whose place plain torch takes on a CPU: losses against stock libraries.

The stock libraries compute a row at a time, with transformers' eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from qlora_fsdp.layers.attention import choose as attention
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.runtime.processes import Processes
from tests.helpers.plain_varlen import cpu_with_varlen
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import Trained, settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 2e-6
# gpt-oss has sinks, and windows in every second layer; DeepSeek V3 has values narrower than its keys.
FAMILIES = ("gpt_oss", "deepseek_v3")


def train_by_starts(cases: Mapping[str, Sequence[str]]) -> dict[str, Trained]:
    """Runs on this rank of a world."""
    with cpu_with_varlen():
        return train_all(cases, chosen_attention)


def chosen_attention(model: TaskModel, processes: Processes) -> str:
    return model.base.config._attn_implementation


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[..., Path], rows: Path) -> dict[str, list[str]]:
    return {family: settings(checkpoint(family), rows, "training.max_steps=8") for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(cases: dict[str, list[str]]):
    def run(num_ranks: int) -> list[dict[str, Trained]]:
        split = [f"training.micro_batch_size={4 // num_ranks}"]
        return run_ranks(num_ranks, train_by_starts, {family: [*argv, *split] for family, argv in cases.items()})

    return once(run)


@pytest.fixture(scope="module")
def stock(cases: dict[str, list[str]]) -> Callable[[str], list[float]]:
    """Losses of the reference, each computed once."""
    return cache(lambda family: stock_losses(cases[family]))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_rows_alone(runs, stock, family: str, num_ranks: int):
    expected = stock(family)
    for rank in runs(num_ranks):
        assert rank[family].inspected == attention.VARLEN
        assert rank[family].losses == pytest.approx(expected, abs=TOLERANCE)
    assert expected[-1] < expected[0]
