"""Checkpoints that two ranks write, whichever of them is ahead."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlora_fsdp.checkpoint import Checkpoint, read_manifest
from qlora_fsdp.checkpoint_write import HostCopy, write_checkpoint
from qlora_fsdp.distributed import start_processes, stop_processes
from tests.helpers.ranks import Meeting, run_ranks

pytestmark = pytest.mark.distributed


def write_adapter(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")


def write_late(folder: Path) -> str | None:
    """A checkpoint for which rank 0 makes the folder a while after it has cleaned up."""
    Meeting.new_port()
    processes = start_processes(60, use_cpu=True)
    remove = shutil.rmtree

    def remove_slowly(*args: Any, **kwargs: Any) -> None:
        remove(*args, **kwargs)
        time.sleep(0.5)

    shutil.rmtree = remove_slowly  # type: ignore[assignment]
    try:
        model = nn.Linear(4, 2, bias=False)
        content = Checkpoint(folder / "step-00000001", 1, processes.num_ranks, {}, {})
        snapshot = HostCopy().take(model, torch.optim.AdamW(model.parameters()))
        return write_checkpoint(content, snapshot, write_adapter, processes)
    finally:
        shutil.rmtree = remove
        stop_processes()


def test_a_rank_may_be_ahead_of_the_first(tmp_path: Path):
    assert run_ranks(2, write_late, tmp_path) == [None, None]
    assert read_manifest(tmp_path / "step-00000001").num_ranks == 2
