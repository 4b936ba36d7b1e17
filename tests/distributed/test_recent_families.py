"""What people train in 2026: losses on 1, 2 and 3 ranks, packed and padded, against stock libraries, in float32.

All runs on a number of ranks share one world. `make test` takes few steps of those whose mechanism no other test has:
per-layer tables (Gemma 4), experts beside delta rules (Qwen3.5), latent attention with experts (GLM-4.7-Flash).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.families import EPS, make_config
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
NUM_FEW = 6
SEQUENCES = 6  # of a step, which 1, 2 and 3 ranks share
LIMIT_SECONDS = 1200
# Whether rows are packed on a CPU: gpt-oss' masks ignore rows, and Mamba's scans keep them apart in CUDA kernels alone.
FAMILIES = {
    "gemma4_text": True,
    "gemma4_unified_text": True,
    "glm4_moe_lite": True,
    "gpt_oss": False,
    "granite": True,
    "granitemoehybrid": False,
    "ministral3": True,
    "mistral4": True,
    "nemotron_h": False,
    "olmo3": True,
    "qwen3_5_moe_text": True,
    "qwen3_5_text": True,
    "smollm3": True,
}
INT8_TABLE = "gemma4_text, its table for all layers in int8"
FAMILIES[INT8_TABLE] = True
QUICK = (INT8_TABLE, "glm4_moe_lite", "qwen3_5_moe_text")
Case = tuple[str, bool]  # a family, and whether its rows are packed
CASES: list[Case] = [(family, False) for family in FAMILIES]
CASES += [(family, True) for family, is_packed in FAMILIES.items() if is_packed]


def is_slow(num_ranks: int, case: Case) -> bool:
    """Whether only `make test-all` trains this."""
    family, packing = case
    return num_ranks != 2 or family not in QUICK or not packing


@pytest.fixture(scope="module")
def num_steps(request: pytest.FixtureRequest) -> int:
    """Few where this session runs no slow test of this file."""
    of_this_file = (item for item in request.session.items if item.path == request.path)
    return 20 if any(item.get_closest_marker("slow") is not None for item in of_this_file) else NUM_FEW


@pytest.fixture(scope="module")
def settings_of(
    tmp_path_factory: pytest.TempPathFactory, rows: Path, num_steps: int
) -> Callable[[Case, int], list[str]]:
    """`settings_of(case, num_ranks)`: the command line of a run."""
    folder = tmp_path_factory.mktemp("recent")
    checkpoint = cache(lambda family: write_checkpoint(make_config(family), folder / family))

    def find(case: Case, num_ranks: int) -> list[str]:
        name, packing = case
        family = name.partition(",")[0]
        stored = ["quant.embeddings=int8"] if name == INT8_TABLE else []
        batch = [f"training.micro_batch_size={SEQUENCES // num_ranks}", f"training.global_batch_size={SEQUENCES}"]
        steps = [f"training.max_steps={num_steps}", f"optim.eps={EPS}"]
        return settings(checkpoint(family), rows, *batch, *steps, *stored, packing=packing)

    return find


@pytest.fixture(scope="module")
def losses(
    settings_of: Callable[[Case, int], list[str]], num_steps: int
) -> Callable[[int], list[dict[Case, list[float]]]]:
    """`losses(num_ranks)`: each rank's losses of all cases that this session may ask for."""

    def train(num_ranks: int) -> list[dict[Case, list[float]]]:
        cases = [case for case in CASES if num_steps > NUM_FEW or not is_slow(num_ranks, case)]
        arguments = {case: settings_of(case, num_ranks) for case in cases}
        ranks = run_ranks(num_ranks, train_all, arguments, timeout_seconds=LIMIT_SECONDS)
        return [{case: run.losses for case, run in runs.items()} for runs in ranks]

    return once(train)


@pytest.fixture(scope="module")
def stock(settings_of: Callable[[Case, int], list[str]]) -> Callable[[Case], list[float]]:
    """Losses of the reference, computed once for all numbers of ranks."""
    return cache(lambda case: stock_losses(settings_of(case, 1)))


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        pytest.param(n, case, marks=[pytest.mark.slow] if is_slow(n, case) else [], id=f"{n}-{case[0]}-{case[1]}")
        for n in (1, 2, 3)
        for case in CASES
    ],
)
def test_losses_are_those_of_stock_libraries(losses, stock, num_ranks: int, case: Case):
    everyone = [of_rank[case] for of_rank in losses(num_ranks)]
    assert all(other == everyone[0] for other in everyone), "ranks disagree about the loss"
    assert everyone[0] == pytest.approx(stock(case), abs=TOLERANCE)
    assert everyone[0][-1] < everyone[0][0]
