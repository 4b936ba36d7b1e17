"""Ranks that share sequences on GPUs, with NCCL and torch's varlen kernel, in bfloat16 against stock libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qlora_fsdp.layers.attention.choose import FLASH_4, VARLEN
from tests.gpu.test_gpu_losses import TOLERANCE
from tests.helpers.ranks import once, run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import Trained, attention_of, settings, train_all

NUM_RANKS = min(torch.cuda.device_count(), 4)  # the tiny models have four heads
needs_several = pytest.mark.skipif(NUM_RANKS not in (2, 4), reason="needs two GPUs or four")
# Windows, sinks and experts, heads of keys that are fewer than four ranks, values narrower than keys.
CASES: dict[str, tuple[str, list[str]]] = {
    "llama": ("llama", []),
    "mistral": ("mistral", ["training.micro_batch_size=2"]),
    "gpt_oss": ("gpt_oss", []),
    "deepseek_v3": ("deepseek_v3", []),
    "recomputed": ("llama", ["memory.activations=full"]),
    "offloaded": ("llama", ["memory.activations=offload"]),
    "whole copies": ("llama", ["fsdp.sharding_strategy=NO_SHARD"]),
    "not packed": ("llama", ["training.packing=false", "training.max_length=61"]),
}


@pytest.fixture(scope="module")
def argv(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs")

    def make(case: str, num_slices: int) -> list[str]:
        family, more = CASES[case]
        shared = f"distributed.context_parallel={num_slices}"
        return settings(checkpoint(family), rows, *more, shared, f"run.folder={folder / case.replace(' ', '-')}")

    return make


@pytest.fixture(scope="module")
def runs(argv) -> Callable[[], list[dict[str, Trained]]]:
    cases = {case: argv(case, NUM_RANKS) for case in CASES}
    return once(lambda: run_ranks(NUM_RANKS, train_all, cases, attention_of, gpu=True))


@needs_several
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_rows_alone(runs, argv, case: str):
    expected = stock_losses(argv(case, 1), device="cuda:0", dtype=torch.bfloat16)
    for rank in runs():
        assert rank[case].losses == pytest.approx(expected, rel=TOLERANCE)
        assert rank[case].inspected in {f"{kernel}_in_{NUM_RANKS}_slices" for kernel in (VARLEN, FLASH_4)}
    assert expected[-1] < expected[0]
