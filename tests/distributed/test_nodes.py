"""Nodes that do not hold the same files: here two processes in folders of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import ModelConfig
from qlora_fsdp.model import find
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from tests.helpers.ranks import Meeting, run_ranks

pytestmark = pytest.mark.distributed


def find_on_each(folders: list[Path]) -> str:
    """Look for the model `here` in a folder of this rank's own, as the first of its node; what went wrong."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folders[rank])

    def no_hub(path: str, **options: object) -> str:
        raise OSError(f"no network on rank {rank}")

    download, find.snapshot_download = find.snapshot_download, no_hub
    Meeting.new_port()
    processes = start_processes(20, use_cpu=True)
    try:
        find.find_model(ModelConfig(path="here"), processes.is_local_main, processes.first_error)
        return "found"
    except CheckpointError as error:
        return str(error)
    finally:
        find.snapshot_download = download
        stop_processes()


def test_a_model_that_one_node_lacks_is_missed_by_all(checkpoint: Callable[..., Path], tmp_path: Path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "here").symlink_to(checkpoint("llama"))
    errors = run_ranks(2, find_on_each, folders, timeout_seconds=120)
    assert errors[0] == errors[1] and "model.path=here is no folder on " in errors[0]
    assert "no network on rank 1" in errors[0]
