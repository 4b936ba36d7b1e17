"""What a run leaves in its folder, on hosts that lack something."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.config.schema import Config
from qlora_fsdp.model import save_adapter
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.ownership import mark
from qlora_fsdp.records.run_folder import check_room, close_run_folder, open_run_folder
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    yield start_processes(60, use_cpu=True)
    stop_processes()


def config(folder: Path) -> Config:
    return load_config(["model=tiny", "data=random", f"run.folder={folder}"])


def test_a_host_without_git_has_no_commit(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = open_run_folder(config(tmp_path / "run"), processes)
    close_run_folder()
    assert json.loads((folder / "environment.json").read_text())["git_commit"] is None


def test_a_run_that_starts_anew_has_no_records_of_the_last(tmp_path: Path, processes: Processes):
    mark(tmp_path)
    (tmp_path / "adapter").mkdir()
    for name in ("bad_steps/step-00000003.json", "tensorboard/events", "metrics.jsonl", "adapter/kept-until-replaced"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for keep in (True, False):
        open_run_folder(config(tmp_path), processes, keep_records=keep)
        close_run_folder()
        there = [
            name for name in ("bad_steps", "tensorboard", "metrics.jsonl", "adapter") if (tmp_path / name).exists()
        ]
        assert there == (["bad_steps", "tensorboard", "metrics.jsonl", "adapter"] if keep else ["adapter"])


def test_a_full_disk_is_the_error_to_the_end(tmp_path: Path):
    journal = Journal(tmp_path, config(tmp_path), 9, is_main=True)
    journal.metrics = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    with pytest.raises(RunFolderError, match="No space left"):
        journal.evaluation(1, 2.0, {}, 0.1)
    with pytest.raises(RunFolderError, match="No space left"):  # the line is still in the file's buffer
        journal.close({})


def test_room_is_looked_for_before_the_work(tmp_path: Path, processes: Processes):
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path, free // 2, processes)
    with pytest.raises(RunFolderError, match=r"has room for .* MiB, and the adapter takes .*set run\.folder"):
        check_room(tmp_path, 2 * free, processes)


@pytest.mark.parametrize("has_room", [True, False])
def test_an_adapter_for_a_full_disk_is_saved_elsewhere(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, has_room: bool
):
    def write(model: Any, state: Any, keys: Any, folder: Path, *others: Any) -> None:
        folder.mkdir(parents=True)
        if folder.is_relative_to(tmp_path / "run") or not has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "adapter_model.safetensors").touch()

    monkeypatch.setattr(save_adapter, "gather_trainable", lambda model, processes: {})
    monkeypatch.setattr(save_adapter, "adapter_keys", lambda model: {})
    monkeypatch.setattr(save_adapter, "write_adapter", write)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    with pytest.raises(RunFolderError, match="No space left on device") as caught:
        save_adapter.save_adapter(None, tmp_path / "run" / "adapter", None, "", "", processes)  # type: ignore[arg-type]
    saved = list(tmp_path.glob("qlora_fsdp-*/adapter/adapter_model.safetensors"))
    assert len(saved) == has_room
    assert (not has_room) or f"The adapter is in {saved[0].parent} on " in str(caught.value)
    assert not list(tmp_path.glob("run/.adapter*"))


def test_half_a_file_is_not_left_behind(tmp_path: Path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "config.yaml", "name: \udc80\n")
    assert list(tmp_path.iterdir()) == []
