"""The run folder: what a run leaves behind. Only rank 0 writes.

config.yaml        every setting, resolved
environment.json   command, git commit, versions, GPUs
train.log          what the console showed
metrics.jsonl      a line a step, an evaluation and a checkpoint
generations.jsonl  what the model wrote at evaluations, with tracking.num_generations
summary.json       how the run ended, and its figures
report.html        the same to look at, with curves
bad_steps/         the rows of steps whose gradient was not used
tensorboard/       event files, with tracking.tensorboard
adapter/           the result
.lock              held by the run that is writing here
.attempt           which start of which launch that is: a restart goes on
checkpoints/       what an interrupted run goes on from
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError

from qlora_fsdp.common.errors import RunFolderError
from qlora_fsdp.common.files import write_atomically, write_json
from qlora_fsdp.config.compose import to_yaml
from qlora_fsdp.config.schema import Config
from qlora_fsdp.records.run_state import LOCK, RECORDS
from qlora_fsdp.runtime.processes import Processes

PACKAGES = (
    "qlora-fsdp",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "datasets",
    "hydra-core",
    "safetensors",
)

LOCK_SECONDS = 5.0  # for the run before this one to end, and for those that only look whether there is one

log = logging.getLogger("qlora_fsdp")
_locks: list[TextIO] = []


def open_run_folder(config: Config, processes: Processes, keep_records: bool = False) -> Path:
    """Make the run folder and write what is known at the start; logging goes to the console and train.log on rank 0.

    Args:
        config: where, and what is written.
        processes: all ranks take part.
        keep_records: go on in the `RECORDS` that are there.

    Returns:
        The folder, the same on every rank: rank 0's word counts, whatever the others' clocks or folders are.

    Raises:
        RunFolderError: it can't be written, or another run is writing to it.
    """
    folder = Path(processes.share(str(Path(config.run.folder).expanduser().resolve())))
    handlers: list[logging.Handler] = []
    if processes.is_main:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _lock(folder)
            for stale in ("summary.json", *(() if keep_records else RECORDS)):
                if (folder / stale).is_dir():
                    shutil.rmtree(folder / stale)
                else:
                    (folder / stale).unlink(missing_ok=True)
            write_atomically(folder / "config.yaml", to_yaml(config))
            write_json(folder / "environment.json", describe_environment(processes))
            handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "train.log")]
    log.handlers[:] = handlers or [logging.NullHandler()]
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    return folder


def check_room(folder: Path, num_bytes: int, processes: Processes) -> None:
    """Whether `num_bytes`, which are to be written when all work is done, have room now. Every rank calls this.

    Raises:
        RunFolderError: on every rank.
    """
    free = shutil.disk_usage(folder).free if processes.is_main else num_bytes
    problem = None
    if free < num_bytes:
        problem = (
            f"run.folder={folder} has room for {free / 2**20:,.1f} MiB, and the adapter takes "
            f"{num_bytes / 2**20:,.1f}. Free space there, or set run.folder to a folder on another disk."
        )
    problem = processes.first_error(problem)
    if problem is not None:
        raise RunFolderError(problem)


def close_run_folder() -> None:
    """Let another run have the folder; safe to call when none is open."""
    for handler in log.handlers:
        handler.close()
    log.handlers[:] = [logging.NullHandler()]
    while _locks:
        _locks.pop().close()


def describe_environment(processes: Processes) -> dict[str, Any]:
    """Command, commit, versions and hardware, to repeat the run or to report a bug."""
    cuda = processes.device.type == "cuda"
    return {
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "folder": str(Path.cwd()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git_commit": _git_commit(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "num_ranks": processes.num_ranks,
        "num_ranks_a_node": processes.local_num_ranks,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cpu_count": os.cpu_count(),
    }


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around what is written to the run folder: a failure names the setting.

    Raises:
        RunFolderError: no permission, read-only, or full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"run.folder={folder} can't be written: {error}. Free space there, or set run.folder to a folder that you "
            "may write to."
        ) from error


def _lock(folder: Path) -> None:
    """Keep other runs out of the folder until `close_run_folder` or the end of this process; rank 0 only."""
    file = (folder / LOCK).open("a+")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.seek(0)
            raise RunFolderError(
                f"run.folder={folder} is in use: {file.read().strip() or 'another run'} is writing to it. Stop that "
                "run, or set another run.name or run.folder."
            ) from None
        except OSError:
            return  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        _locks.append(file)
        return


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the working folder, or of the package where it runs from a clone; None without git."""
    for folder in (Path.cwd(), Path(__file__).parent):
        with suppress(OSError):
            command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout.strip()
    return None
