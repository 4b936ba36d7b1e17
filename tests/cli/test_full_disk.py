"""A run folder that can't be written any more: the run goes on, saves what it has elsewhere, and says where."""

from __future__ import annotations

import errno
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from qlora_fsdp.training.checkpoints.checkpoint import read_manifest
from tests.cli.launch import SHORT_STEPS, Command, ForkedLaunch
from tests.helpers.full_disk import fill_disk, small_disk

pytestmark = pytest.mark.distributed

TINY = ["model=tiny", "model.config.num_hidden_layers=1", "data=random", "training.max_length=64", *SHORT_STEPS]
LONG_RUN = [*TINY, "training.max_steps=100000"]
WARNING = r"metrics\.jsonl can't be written: {}\. Training goes on\."


def end(command: Command, number: signal.Signals = signal.SIGTERM) -> str:
    """The message of a run that is told to stop."""
    command.rank(0).send_signal(number)
    assert command.finish() == 128 + number, command.output
    (message,) = command.errors
    # A checkpoint that was due before the signal may fail after it. The last failure is that of the step it ends at.
    assert "Training goes on" not in command.output.rpartition("No checkpoint of step ")[2], "it stops"
    return message


def saved_in(message: str) -> Path:
    """The folder that a message names."""
    (path,) = re.findall(r" in (/\S*-rescued-\S*)", message)
    return Path(path)


def test_a_run_on_a_full_disk_goes_on_and_its_adapter_is_elsewhere(tmp_path: Path) -> None:
    fill = partial(fill_disk, tmp_path / "run", 3)
    command = ForkedLaunch(tmp_path, 1, *TINY, "training.max_steps=8", preexec=fill)
    assert command.finish() == 2, command.output
    (message,) = command.errors
    assert f"run.folder={command.run_folder} can't be written: No space left on device." in message
    assert len(re.findall(WARNING.format("No space left on device"), command.output)) == 1
    assert "8/8 " in command.output and not (command.run_folder / "adapter").exists()
    adapter = saved_in(message)
    assert f"All steps are done, and the adapter is in {adapter} on " in message
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in adapter.iterdir()}
    lines = [(folder / "metrics.jsonl").read_text().count("\n") for folder in (command.run_folder, adapter.parent)]
    assert lines == [3, 5], "the rest is beside the adapter"


def test_a_run_that_stops_on_a_full_disk_is_saved_elsewhere_and_goes_on_from_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    every = ["checkpoint.every_steps=5"]
    command = ForkedLaunch(tmp_path, 2, *LONG_RUN, *every, preexec=partial(fill_disk, run, 3, errno.EDQUOT))
    failed = (
        "No checkpoint of step 5: .* can't be written: Disk quota exceeded. No earlier step is saved. Training goes"
    )
    command.wait_for(lambda: re.search(failed, command.output) is not None, "a failed checkpoint")
    message = end(command)
    assert message.startswith("Interrupted by SIGTERM. Step ")
    assert f"can't be saved in {run / 'checkpoints'}: Disk quota exceeded. It is saved in " in message
    checkpoint = saved_in(message)
    step = read_manifest(checkpoint).step
    assert f"Move it to {run / 'checkpoints'} once there is room; the same command goes on from there." in message
    (run / "checkpoints").mkdir(exist_ok=True)
    shutil.move(checkpoint, run / "checkpoints")
    again = ForkedLaunch(tmp_path, 2, *LONG_RUN)
    again.wait_for(lambda: f"Going on from step {step}, " in again.output, "the same command goes on")
    again.kill()


def test_a_folder_that_is_removed_while_the_run_writes_to_it(tmp_path: Path) -> None:
    command = ForkedLaunch(tmp_path, 1, *LONG_RUN)
    command.wait_for_steps()
    command.run_folder.rename(tmp_path / "moved")  # at one moment; else a line comes between
    command.wait_for(lambda: "the folder was removed. Training goes on" in command.output, "a warning")
    message = end(command)
    assert "the folder was removed. It is saved in " in message
    assert read_manifest(saved_in(message)).step > 0
    assert not command.run_folder.exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_disk_that_is_really_full(tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    command = ForkedLaunch(tmp_path, 1, *LONG_RUN, f"run.folder={run}", "tracking=tensorboard")
    command.run_folder = run
    command.wait_for_steps()
    for times in (1, 2):
        with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1000))
        full = "can't be written: No space left on device. Training goes on"
        command.wait_for(partial(_says, command, full, times), "a warning")
        if times == 1:
            (disk / "filler").unlink()
            command.wait_for(partial(_says, command, "can be written again: nothing is missing", 1), "the end of it")
    message = end(command)
    assert f"can't be saved in {run / 'checkpoints'}: No space left on device. It is saved in " in message
    checkpoint = saved_in(message)
    assert read_manifest(checkpoint).step > 0
    shutil.rmtree(checkpoint.parent)


def _says(command: Command, text: str, times: int) -> bool:
    return command.output.count(text) == times
