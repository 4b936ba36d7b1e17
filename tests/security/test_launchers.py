"""What torch's launchers do before there are ranks, and what launchers that are killed leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.common import own_folder
from qlora_fsdp.common.run_key import NODE_FOLDER
from tests.cli.launch import ROOT, SHORT_STEPS, Launch, child_environment
from tests.helpers.ranks import start_process

TINY = ["model=tiny", "model.config.num_hidden_layers=1", "data=random", "training.max_length=32", "lora.r=4"]
CPU_CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"
WARNING = "Warning: the launcher of the ranks has met by c10d, torchrun's default on one host, in which whoever reaches"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.distributed
@pytest.mark.parametrize("has_port", [False, True])
def test_a_rank_that_torchrun_has_started_by_c10d_says_what_to_type(has_port: bool, tmp_path: Path) -> None:
    """With a port torchrun has no reason to meet by c10d, and nothing is said."""
    options = [f"--master-port={free_port()}"] if has_port else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *options]
    settings = [*TINY, *SHORT_STEPS, "training.max_steps=1", f"run.folder={tmp_path / 'run'}"]
    command = [*launcher, "-m", "qlora_fsdp.train", *settings]
    done = subprocess.run(command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(WARNING) == int(not has_port)


@pytest.mark.distributed
def test_accelerate_whose_port_is_taken_meets_by_c10d_and_says_so(tmp_path: Path) -> None:
    """Then it starts torchrun without a port, which meets by its default."""
    settings = [*TINY, *SHORT_STEPS, "training.max_steps=1", f"run.folder={tmp_path / 'run'}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        options = ["--config_file", str(CPU_CONFIG), "--main_process_port", port]
        command = [*launcher, *options, "-m", "qlora_fsdp.train", *settings]
        done = subprocess.run(
            command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
        )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert printed.count(WARNING) == 1, printed


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders of runs are made, and nothing else is."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names_in(place: Path) -> set[str]:
    """The names of runs' folders, and of what is not finished."""
    return {found.name for found in place.glob(f"*{own_folder.PREFIX}*")}


def stay(place: str, made: Any) -> None:
    """Make a folder, and stay in it."""
    tempfile.tempdir = place
    made.send(str(own_folder.make_folder().path))
    signal.pause()


def enter_and_stay(path: str, entered: Any) -> None:
    """Stay in a folder that another process has made."""
    own_folder.enter(Path(path))
    entered.send("")
    signal.pause()


def started(function: Any, text: str) -> tuple[Any, str]:
    """A process that stays in a folder, and what it has told."""
    mine, theirs = Pipe(duplex=False)
    process = start_process(function, text, theirs)
    return process, mine.recv()


def killed(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_folders_of_killed_runs_go_with_the_next_start_and_no_others(folders: Path) -> None:
    launcher, left = started(stay, str(folders))
    rank, _ = started(enter_and_stay, left)
    alive, kept = started(stay, str(folders))
    no_folder = folders / f"{own_folder.PREFIX}of-another-version"
    no_folder.mkdir(mode=0o700)
    link = folders / f"{own_folder.PREFIX}link"
    link.symlink_to(kept)
    others = {Path(kept).name, no_folder.name, link.name}
    killed(launcher)
    own = own_folder.make_folder()
    assert names_in(folders) == {Path(left).name, own.path.name, *others}, "a rank is still there"
    killed(rank)
    own_folder.make_folder()
    assert not Path(left).exists()
    assert own.path.is_dir(), "a process's own is not left by it"
    killed(alive)
    own_folder.leave_folder()
    own_folder.remove_left_folders()
    assert names_in(folders) == {no_folder.name, link.name}


def test_a_folder_goes_with_the_last_process_that_leaves_it(folders: Path) -> None:
    """As where a launcher was killed: its ranks save, and leave."""
    launcher, left = started(stay, str(folders))
    own_folder.enter(Path(left))
    killed(launcher)
    own_folder.leave_folder()
    assert names_in(folders) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder is made by root")
def test_folders_of_other_users_are_not_touched(folders: Path) -> None:
    theirs = folders / f"{own_folder.PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    (theirs / own_folder.KEY_FILE).write_text("key")
    os.chown(theirs, 65534, 65534)
    own_folder.remove_left_folders()
    assert list(theirs.iterdir()) == [theirs / own_folder.KEY_FILE]


@pytest.mark.distributed
def test_a_run_that_is_killed_leaves_a_folder_until_the_next_start(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    environment = {"TMPDIR": str(place)}
    settings = [*TINY, *SHORT_STEPS, "launch.num_processes=2"]
    run = Launch(tmp_path / "first", "qlora-fsdp", *settings, "training.max_steps=100000", environment=environment)
    try:
        run.wait_for_steps(1)
        left = Path(run.rank(0).environ()[NODE_FOLDER])
    finally:
        run.kill()
    assert names_in(place) == {left.name}
    again = Launch(tmp_path / "second", "qlora-fsdp", *settings, "training.max_steps=1", environment=environment)
    try:
        assert again.finish() == 0, again.output
    finally:
        again.kill()
    assert names_in(place) == set()
