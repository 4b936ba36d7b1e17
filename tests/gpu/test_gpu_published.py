"""Optimizers and losses on GPUs in bfloat16 against stock ones, and pages of optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import PagedAdamW8bit, PagedAdamW32bit
from torch import nn

from qlora_fsdp.config.schema import OptimConfig, Optimizer
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, load_checkpoint, read_manifest
from qlora_fsdp.training.checkpoints.write import HostCopy, write_checkpoint
from qlora_fsdp.training.optim import make_optimizer
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_all

TOLERANCE = 1e-2  # as in test_gpu_losses
NUM_RANKS = torch.cuda.device_count()
SLOWER = "training.learning_rate=0.0003"
CASES = {
    "paged_adamw_8bit": ["optim=paged_adamw_8bit", "lora.r=64"],
    "paged_adamw_32bit": ["optim=paged_adamw_32bit"],
    "lion_8bit": ["optim=lion_8bit", "lora.r=64", SLOWER],
    "adafactor": ["optim=adafactor"],
    "label smoothing": ["task.label_smoothing_factor=0.1"],
    "dft": ["task.loss_type=dft"],
}


@pytest.fixture(scope="module")
def arguments(checkpoint: Callable[..., Path], rows: Path) -> dict[str, list[str]]:
    batch = f"training.global_batch_size={max(4, NUM_RANKS)}"
    return {case: settings(checkpoint("llama"), rows, batch, *more) for case, more in CASES.items()}


@pytest.fixture(scope="module")
def losses(arguments: dict[str, list[str]]) -> dict[str, list[float]]:
    first, *_ = run_ranks(NUM_RANKS, train_all, arguments, gpu=True)
    return {case: trained.losses for case, trained in first.items()}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_stock_libraries(arguments, losses, case: str):
    assert losses[case] == pytest.approx(stock_losses(arguments[case], "cuda:0", torch.bfloat16), rel=TOLERANCE)


ALONE: Any = SimpleNamespace(
    rank=0,
    num_ranks=1,
    is_main=True,
    wait=lambda patiently=False: None,
    first_error=lambda error: error,
    share=lambda value, kind: value,
    gather=lambda value, kind: [value],
)


@pytest.mark.parametrize("name", [Optimizer.paged_adamw_8bit, Optimizer.paged_adamw_32bit])
def test_pages_are_bitsandbytes_own_and_come_back_from_a_checkpoint(
    name: Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """State of more than 100,000 elements lies in pages; after a checkpoint the steps go on as if there had been none.

    bitsandbytes' own optimizer goes beside it, bit for bit.
    """
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 1)
    torch.manual_seed(0)
    ours = nn.Linear(512, 1024, bias=False).cuda()
    plain = nn.Parameter(ours.weight.detach().clone())
    config = OptimConfig(name=name)
    optimizer = make_optimizer(ours.parameters(), config, 1e-3)
    kind = PagedAdamW8bit if name is Optimizer.paged_adamw_8bit else PagedAdamW32bit
    reference = kind([plain], lr=1e-3, weight_decay=0.0)
    for step in range(6):
        ours.weight.grad = torch.randn(1024, 512, device="cuda")
        plain.grad = ours.weight.grad.clone()
        optimizer.step()
        reference.step()
        torch.cuda.synchronize()
        assert torch.equal(ours.weight, plain)
        if step == 2:
            content = Checkpoint(tmp_path / "step-00000003", 3, 1, {}, {})
            snapshot = HostCopy().take(ours, optimizer)
            assert write_checkpoint(content, snapshot, lambda folder, state: folder.mkdir(), ALONE) is None
            ours = nn.Linear(512, 1024, bias=False).cuda()
            optimizer = make_optimizer(ours.parameters(), config, 1e-3)
            load_checkpoint(read_manifest(content.folder), ours, optimizer, ALONE)
            (state,) = optimizer.inner.state.values()
            assert state["state1"].is_paged and state["state2"].is_paged
