"""What a run leaves in its folder, on hosts that lack something."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lines import broken_pipe
from tests.helpers.quick_config import load_config
from tests.helpers.run_folders import start_folder

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically
from qlora_fsdp.config.schema import Config
from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.model.adapters import write_adapter as adapter_files
from qlora_fsdp.records.check_run_folder import check_run_folder, mark
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.records.run_folder import check_room, close_run_folder, log
from qlora_fsdp.runtime.processes import Processes


def config(folder: Path) -> Config:
    return load_config(["model=tiny", "data=random", f"run.folder={folder}"])


def test_a_host_without_git_has_no_commit(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = start_folder(config(tmp_path / "run"), processes)
    close_run_folder()
    assert json.loads((folder / "environment.json").read_text())["git_commit"] is None


def test_a_run_that_starts_anew_has_no_records_of_the_last(tmp_path: Path, processes: Processes):
    mark(tmp_path)
    (tmp_path / "adapter").mkdir()
    for name in ("bad_steps/step-00000003.json", "tensorboard/events", "metrics.jsonl", "adapter/kept-until-replaced"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for keep in (True, False):
        start_folder(config(tmp_path), processes, keep_records=keep)
        close_run_folder()
        there = [
            name for name in ("bad_steps", "tensorboard", "metrics.jsonl", "adapter") if (tmp_path / name).exists()
        ]
        assert there == (["bad_steps", "tensorboard", "metrics.jsonl", "adapter"] if keep else ["adapter"])


@pytest.mark.parametrize("manifest", [None, "", '{"step": 7'])
def test_a_checkpoint_without_a_whole_manifest_is_told_as_such(tmp_path: Path, manifest: str | None):
    """As where a run was copied in part. It was said to be of no run, and another run.name advised."""
    mark(tmp_path)
    (damaged := tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    if manifest is not None:
        (damaged / "manifest.json").write_text(manifest)
    (problem,) = check_run_folder(config(tmp_path).run)
    assert "holds checkpoints/step-00000007, whose manifest.json is missing or damaged. Move this away" in str(problem)
    damaged.rename(tmp_path / "aside")
    assert not [*check_run_folder(config(tmp_path).run)]


REASONS = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EROFS: "Read-only file system",
    errno.EACCES: "Permission denied",
}


@pytest.mark.parametrize("number", REASONS)
def test_records_wait_for_a_disk_that_takes_no_more(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: Any, number: int
):
    """A warning when it begins, a line when it is over, and in the end nothing is missing: not even half a line."""
    write, failing = os.write, False

    def write_half(descriptor: int, data: bytes) -> int:
        if failing and (size := os.fstat(descriptor).st_size) % 10:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data[: 10 - size % 10] if failing else data)

    journal = Journal(start_folder(config(tmp_path), processes), TrackingSpec.of(config(tmp_path)), 9, is_main=True)
    monkeypatch.setattr(os, "write", write_half)
    try:
        for step in range(6):
            failing = step in (2, 3, 4)
            journal.evaluation(step, 2.0, {}, 0.1)
            assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    finally:
        close_run_folder()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [*range(6)]
    for said in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        assert said.count(f"metrics.jsonl can't be written: {REASONS[number]}. Training goes on.") == 1
        assert said.count("can be written again: nothing is missing.") == 1
        assert said.count("2.0000") == 6


def test_records_of_a_folder_that_is_removed_are_not_put_into_another_run(tmp_path: Path, processes: Processes):
    folder = tmp_path / "run"
    start_folder(config(folder), processes)
    try:
        records, elsewhere = records_in(folder), tmp_path / "elsewhere"
        shutil.rmtree(folder)
        records.append("metrics.jsonl", "1\n")
        assert records.reason == "the folder was removed" and not folder.exists()
        folder.mkdir()
        (folder / ".lock").write_text("process 1 on other\n")
        records.append("metrics.jsonl", "2\n")
        records.write("summary.json", Path.touch)  # into the folder of another run
        elsewhere.mkdir()
        records.write_rest(elsewhere)
        assert (elsewhere / "metrics.jsonl").read_text() == "1\n2\n" and len([*folder.iterdir()]) == 1
    finally:
        close_run_folder()


def test_a_run_does_not_end_with_its_console(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch):
    """Standard output is a file on a full disk, or a pipe that nobody reads any more."""
    folder = config(tmp_path / "run")
    for stream in (os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), broken_pipe()):
        monkeypatch.setattr("sys.stdout", stream)
        log.propagate = False
        start_folder(folder, processes)
        log.warning("A line.")
        close_run_folder()
        stream.close()  # raises where a buffer is still full
        assert "A line.\n" in (tmp_path / "run" / "train.log").read_text()


def test_room_is_looked_for_before_the_work(tmp_path: Path, processes: Processes):
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path, free // 2, free // 2, processes)
    with pytest.raises(RunFolderError, match=r"has room for .* MiB, and the adapter takes .*set run\.folder"):
        check_room(tmp_path, 2 * free, 2 * free, processes)


def test_a_file_that_is_larger_than_the_limit_of_the_shell_is_told_before_the_work(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * 2**20, 4 * 2**20))
    check_room(tmp_path, 2**20, 3 * 2**20, processes)
    with pytest.raises(RunFolderError, match=r"a file of 4\.0 MiB, .* files of at most 3\.0 \(ulimit -f\)"):
        check_room(tmp_path, 2**20, 4 * 2**20, processes)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space (os error 28)")]
)
@pytest.mark.parametrize("has_room", [True, False])
def test_an_adapter_for_a_full_disk_is_saved_elsewhere(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, has_room: bool, error: Exception
):
    def write(model: Any, state: Any, keys: Any, folder: Path, *others: Any) -> None:
        folder.mkdir(parents=True)
        if folder.is_relative_to(tmp_path / "run") or not has_room:
            raise error  # as libraries in C and in Rust say it
        (folder / "adapter_model.safetensors").touch()

    monkeypatch.setattr(adapter_files, "gather_trainable", lambda model, processes: {})
    monkeypatch.setattr(adapter_files, "adapter_keys", lambda model: {})
    monkeypatch.setattr(adapter_files, "write_adapter", write)
    (tmp_path / "run").mkdir()
    for name in ("TMPDIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match="No space left on device") as caught:
        adapter_files.save_adapter(None, tmp_path / "run" / "adapter", None, "", "", processes)  # type: ignore[arg-type]
    saved = list(tmp_path.glob("run-rescued-*/adapter/adapter_model.safetensors"))
    assert len(saved) == has_room
    assert "can't be written: No space left on device" in str(caught.value)
    assert (not has_room) or f"the adapter is in {saved[0].parent} on " in str(caught.value)
    assert not list(tmp_path.glob("run/.adapter*"))


def test_half_a_file_is_not_left_behind(tmp_path: Path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "config.yaml", "name: \udc80\n")
    assert list(tmp_path.iterdir()) == []
