"""Checkpoints and adapters that two ranks write, whichever of them is ahead or slow."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlora_fsdp.model.adapters import write_adapter as adapter_files
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, read_manifest
from qlora_fsdp.training.checkpoints.write import HostCopy, write_checkpoint
from tests.helpers.ranks import Meeting, run_ranks

pytestmark = pytest.mark.distributed


TEMPLATE = "adapter/additional_chat_templates/tool_use.jinja"  # such as transformers saves with some tokenizers


def write_adapter(folder: Path, state: dict[str, Tensor]) -> None:
    (folder.parent / TEMPLATE).parent.mkdir(parents=True)
    (folder.parent / TEMPLATE).write_text("{{ tools }}")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def write_late(folder: Path) -> str | None:
    """A checkpoint for which rank 0 makes the folder a while after the others are ready to write to it."""
    Meeting.new_port()
    processes = start_processes(60, use_cpu=True)
    token = secrets.token_hex

    def token_slowly(num_bytes: int) -> str:
        time.sleep(0.5 if processes.is_main else 0)
        return token(num_bytes)

    secrets.token_hex = token_slowly  # type: ignore[assignment]
    try:
        model = nn.Linear(4, 2, bias=False)
        content = Checkpoint(folder / "step-00000001", 1, processes.num_ranks, {}, {})
        snapshot = HostCopy().take(model, torch.optim.AdamW(model.parameters()))
        return write_checkpoint(content, snapshot, write_adapter, processes)
    finally:
        secrets.token_hex = token  # type: ignore[assignment]
        stop_processes()


def save_slowly(folder: Path) -> bool:
    """Write an adapter for longer than a collective may take."""
    Meeting.new_port()
    processes = start_processes(2, use_cpu=True)

    def write(*args: Any) -> None:
        time.sleep(4)
        args[3].mkdir()

    before = adapter_files.gather_trainable, adapter_files.adapter_keys, adapter_files.write_adapter
    adapter_files.gather_trainable, adapter_files.adapter_keys, adapter_files.write_adapter = (
        (lambda *_: {}),
        (lambda _: {}),
        write,
    )
    try:
        adapter_files.save_adapter(None, folder / "adapter", None, "", "", processes)  # type: ignore[arg-type]
        return (folder / "adapter").is_dir()
    finally:
        adapter_files.gather_trainable, adapter_files.adapter_keys, adapter_files.write_adapter = before
        stop_processes()


def test_the_adapter_may_take_longer_than_a_collective(tmp_path: Path):
    assert run_ranks(2, save_slowly, tmp_path) == [True, True]


def test_a_rank_may_be_ahead_of_the_first(tmp_path: Path):
    assert run_ranks(2, write_late, tmp_path) == [None, None]
    written = read_manifest(tmp_path / "step-00000001")
    assert written.num_ranks == 2 and written.files[TEMPLATE][0] == len("{{ tools }}")
