"""Checkpoints are written by a thread, from a copy, while training goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.full_disk import small_disk
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from torch import Tensor, nn

from qlora_fsdp.common.errors import Interrupted, StopNow
from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.watch import Watch
from qlora_fsdp.training.checkpoints import saver as saver_module
from qlora_fsdp.training.checkpoints import thread as checkpoint_thread
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, read_manifest, verify_files
from qlora_fsdp.training.checkpoints.saver import Saver
from qlora_fsdp.training.checkpoints.thread import CheckpointThread

ADAPTER = Path("adapter/adapter.safetensors")


class Writes:
    """Stands for the adapter's writer: waits until it is let go on, and fails when it is told to."""

    def __init__(self) -> None:
        self.go, self.error = threading.Event(), None

    def __call__(self, folder: Path, state: dict[str, Tensor]) -> None:
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        folder.mkdir()
        save_file(state, folder / ADAPTER.name)


@pytest.fixture
def training(tmp_path: Path, processes: Processes) -> Any:
    """A model of one number, its saver, which saves after every step, and the writer that it waits for."""
    config = load_config(["model=tiny", "data=random", "checkpoint.every_steps=1", "checkpoint.keep_last=1"])
    model, writes = nn.Linear(1, 1, bias=False), Writes()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = cast(Watch, SimpleNamespace(asked=None))
    content = Checkpoint(tmp_path / "checkpoints", 0, 1, {}, {})
    journal = Journal(tmp_path, TrackingSpec.of(config), 9, is_main=True)
    thread = CheckpointThread(config.checkpoint, content, model, optimizer, writes, processes, journal, Criterion())
    saver = Saver(thread, watch)
    return SimpleNamespace(model=model, writes=writes, saver=saver, folder=content.folder)


def step(training: Any, number: int) -> None:
    training.model.weight.data.fill_(number)
    training.saver.after_step(number, asked=False)


def saved(training: Any) -> dict[str, float]:
    folders = checkpoint_folders(training.folder)
    return {folder.name: load_file(folder / ADAPTER)["weight"].item() for folder in folders}


def test_a_loss_that_is_no_number_is_not_among_the_best(training: Any):
    thread = training.saver.thread
    thread.config.keep_best = 1
    training.writes.go.set()
    with training.saver:
        for number, loss in enumerate([float("nan"), 2.0, 3.0, 4.0], start=1):
            thread.content.eval_losses.append((number, loss))
            step(training, number)
    assert list(saved(training)) == ["step-00000002", "step-00000004"]


def test_training_goes_on_while_a_checkpoint_is_written(training: Any):
    with training.saver:
        step(training, 1)
        training.model.weight.data.fill_(7.0)  # the next step, before anything was written
        assert saved(training) == {}
        training.writes.go.set()
    assert saved(training) == {"step-00000001": 1.0}
    figures = training.saver.thread.describe()
    assert figures["written"] == 1 and figures["max_stall_seconds"] < figures["max_write_seconds"]
    lines = read_lines(training.folder.parent / "metrics.jsonl")
    assert lines[0]["step"] == 1 and lines[0]["checkpoint_seconds"] > 0


def test_the_next_checkpoint_and_a_signal_wait_for_it(training: Any):
    step(training, 1)
    threading.Timer(0.5, training.writes.go.set).start()
    step(training, 2)
    assert "step-00000001" in saved(training)
    training.saver.watch.asked = signal.SIGTERM
    with pytest.raises(Interrupted, match=r"^Interrupted by SIGTERM\.$"), training.saver:
        training.saver.after_step(3, asked=True)
    assert saved(training) == {"step-00000003": 2.0}, "the older ones are removed"
    assert read_manifest(checkpoint_folders(training.folder)[0]).step == 3
    with pytest.raises(Interrupted, match=r"^Interrupted by SIGTERM\.$"), training.saver:
        training.saver.stop(3)  # the checkpoint is there
    with pytest.raises(Interrupted, match="nothing to save"), training.saver:
        training.saver.stop(0)


def test_failure_is_reported_and_leaves_the_last_one(training: Any, caplog: pytest.LogCaptureFixture):
    training.writes.go.set()
    step(training, 1)
    assert training.saver.save(1).in_run_folder
    training.writes.error = OSError(28, "No space left on device")
    step(training, 2)
    step(training, 3)
    (said,) = {text for text in caplog.messages if text.startswith("No checkpoint of step 2: ")}
    assert "can't be written: No space left on device. Step 1 is the last that is saved. Training goes on" in said
    result = training.saver.save(4)
    assert not result.in_run_folder and "No other folder takes it. Step 1 is the last" in result.text
    assert "Training goes on" not in "".join(text for text in caplog.messages if "step 2" not in text)
    assert list(training.folder.iterdir()) == [training.folder / "step-00000001"]
    training.writes.error = None
    assert training.saver.save(3).in_run_folder and saved(training) == {"step-00000003": 3.0}
    assert training.saver.thread.describe()["written"] == 2


@pytest.mark.parametrize("takes_checkpoints", [True, False])
def test_a_run_that_ends_is_saved_elsewhere(training: Any, tmp_path: Path, monkeypatch: Any, takes_checkpoints: bool):
    """In a folder that has room; where none has room for a checkpoint, the adapter is."""
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    training.writes.go.set()
    write = checkpoint_thread.write_checkpoint

    def fail(content: Checkpoint, *others: Any) -> str | None:
        fails = not takes_checkpoints or content.folder.parent == training.folder
        return "Disk quota exceeded" if fails else write(content, *others)

    monkeypatch.setattr(checkpoint_thread, "write_checkpoint", fail)
    training.model.weight.data.fill_(5.0)
    result = training.saver.save(5)
    assert not result.in_run_folder
    assert result.text.startswith(f"Step 5 can't be saved in {training.folder}: Disk quota exceeded.")
    (place,) = [Path(path.rstrip(".")) for path in result.text.split() if "-rescued-" in path]
    file = place / (ADAPTER if takes_checkpoints else ADAPTER.name)
    assert load_file(file)["weight"].item() == 5.0
    if takes_checkpoints:
        assert read_manifest(place).step == 5
        assert f"Move it to {training.folder} once there is room" in result.text
    else:
        assert "No other folder takes it. No earlier step is saved. The adapter, to use or to start from" in result.text
    shutil.rmtree(place.parent)


@pytest.mark.parametrize("error", [Interrupted(2), StopNow(2), ValueError("a bug")])
def test_an_error_does_not_wait_for_a_stuck_disk(training: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    monkeypatch.setattr(saver_module, "ERROR_SECONDS", 0.3)
    with pytest.raises(type(error)), training.saver:
        step(training, 1)
        raise error
    assert saved(training) == {}
    training.writes.go.set()
    training.saver.thread.wait()
    assert saved(training) == {"step-00000001": 1.0}, "it was whole in the end, and nothing broke"


def test_what_is_evaluated_again_is_not_saved_twice(training: Any):
    """A bad step saves the step before, at which the run has been evaluated; who goes on evaluates there first."""
    training.saver.content.eval_losses[:] = [(0, 2.0), (1, 1.5)]
    training.writes.go.set()
    assert training.saver.save(1)
    assert read_manifest(training.folder / "step-00000001").eval_losses == [[0, 2.0]]


def test_a_copy_beside_the_checkpoints_is_none_of_them(training: Any):
    copy = training.folder / "step-00000001-copy"
    copy.mkdir(parents=True)
    training.writes.go.set()
    with training.saver:
        step(training, 2)
    assert saved(training).keys() == {"step-00000002"} and copy.is_dir()


def test_what_nobody_expected_is_raised_where_training_sees_it(training: Any):
    training.writes.error = AssertionError("a bug")
    training.writes.go.set()
    with pytest.raises(AssertionError, match="a bug"), training.saver:
        step(training, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where the test's run has its checkpoints."""
    with small_disk(tmp_path / "checkpoints", "512k") as folder:
        yield folder


def test_full_and_read_only_disks(disk: Path, training: Any, processes: Processes, caplog: Any):
    training.writes.go.set()
    assert training.saver.save(1).in_run_folder
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2**20))
    assert not training.saver.save(2).in_run_folder
    filler.unlink()
    remount = ["mount", "-o", "remount,ro", str(disk)]
    subprocess.run(remount, check=True)
    assert not training.saver.save(3).in_run_folder
    for step_number, reason in ((2, "No space left on device"), (3, "Read-only file system")):
        (text,) = [text for text in caplog.messages if f"No checkpoint of step {step_number}: " in text]
        assert reason in text and str(disk) in text and "Step 1 is the last that is saved" in text
    verify_files(read_manifest(disk / "step-00000001"), processes)
    subprocess.run([*remount[:2], "remount,rw", remount[3]], check=True)
    assert training.saver.save(4).in_run_folder
    assert [path.name for path in disk.iterdir()] == ["step-00000004"]
