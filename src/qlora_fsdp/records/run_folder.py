"""The run folder, where a run leaves its files.

Rank 0 writes all of them, except for each rank's part of a checkpoint and each rank's memory snapshot.

config.yaml        every setting, as it was written
environment.json   command, git commit, versions, GPUs
train.log          what the console showed, with the time of each line
metrics.jsonl      a line for each step, each evaluation and each checkpoint
generations.jsonl  what the model wrote at evaluations, if tracking.num_generations is set
summary.json       how the run ended, and its figures
report.html        the same as a page with curves
bad_steps/         the rows of steps whose gradient was not used
tensorboard/       event files, if tracking.report_to names it
wandb.json         the id that W&B knows the run by, if tracking.report_to names it; mlflow.json is MLflow's
stream.jsonl       where the windows of the data begin, if data.streaming is set
windows/           the tokenized rows of the last of these windows
memory-RANK.pickle torch's record of allocations after a shortage, if memory.snapshot is set
report_rows.safetensors  a few held-out rows, on which `merge` compares its result with what was trained
adapter/           the result
start_adapter/     a copy of the adapter that the run started from, if lora.start is set
.qlora_fsdp        says that the folder is a run's (check_run_folder.py)
.lock              held by the run that is writing here
.attempt           which start of which launch that is, so that a restart knows to resume
checkpoints/       what an interrupted run resumes from
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from qlora_fsdp.common.errors import RunFolderError, refuse
from qlora_fsdp.common.files import (
    disk_reason,
    free_bytes,
    is_write_error,
    open_to_append,
    remove,
    remove_leftovers,
    write_atomically,
    write_json,
)
from qlora_fsdp.config.schema import RunConfig
from qlora_fsdp.records.check_run_folder import check_run_folder, find_obstacle, mark
from qlora_fsdp.records.console import start_log, stop_log
from qlora_fsdp.records.record_files import holder
from qlora_fsdp.records.run_state import CONFIG_FILE, ENVIRONMENT_FILE, LOCK, RECORDS, SUMMARY_FILE
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

LOCK_SECONDS = 5.0  # how long to wait for the lock: the run before may be ending, or somebody only looks at it

log = logging.getLogger("qlora_fsdp")
_locks: list[TextIO] = []  # open files, because a lock is lost when its file is closed


def hold_run_folder(run: RunConfig, processes: Processes) -> Path:
    """Make the run folder, and keep other runs out of it until `close_run_folder`. Every rank calls this.

    What is in the folder is looked at afterwards: the run before may be saving a checkpoint until this one gets it.

    Args:
        run: says where.
        processes: all ranks take part.

    Returns:
        Rank 0's folder, on every rank. The name may have the time in it, and clocks differ.

    Raises:
        RunFolderError: it can't be written, or another run is writing to it.
        ConfigError: a run has finished there by now.
    """
    folder: Path = processes.share(Path(run.folder).expanduser().resolve(), Path)
    if processes.is_main:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if obstacle := find_obstacle(folder):  # looked for again: it may have come since the settings were checked
                raise RunFolderError(f"run.folder={folder} {' '.join(obstacle)}")
            mark(folder)
            _lock(folder)
        refuse(check_run_folder(run))
    return folder


def open_run_folder(folder: Path, settings: str, processes: Processes, keep_records: bool = False) -> None:
    """Write the settings and the environment to the run folder that this run holds, and start the log.

    On rank 0 the log goes to the console and to train.log; on other ranks it goes nowhere.

    Args:
        folder: from `hold_run_folder`.
        settings: the text of its config.yaml.
        processes: all ranks take part.
        keep_records: append to the `RECORDS` that are there; else they are removed.

    Raises:
        RunFolderError: it can't be written.
    """
    if processes.is_main:
        with writing(folder):
            for name in (*RECORDS, SUMMARY_FILE, CONFIG_FILE, ENVIRONMENT_FILE, "adapter"):
                remove_leftovers(folder / name)  # the run holds the folder, so nobody is writing them
            remove(folder / SUMMARY_FILE)
            if not keep_records:
                for stale in RECORDS:
                    remove(folder / stale)
            write_atomically(folder / CONFIG_FILE, settings)
            write_json(folder / ENVIRONMENT_FILE, _describe_environment(processes))
    start_log(folder if processes.is_main else None)


def check_room(folder: Path, num_bytes: int, file_bytes: int, processes: Processes) -> None:
    """Check that what the run will write can be written. Every rank calls this.

    Args:
        folder: the run folder.
        num_bytes: bytes of the adapter.
        file_bytes: bytes of the largest file of an adapter or a checkpoint, or of a smaller one of them.
        processes: all ranks.

    Raises:
        RunFolderError: there is no room, or the system lets a rank write no such file; raised on every rank.
    """
    free = free_bytes(folder) if processes.is_main else num_bytes
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    problem = None
    if free < num_bytes:
        problem = (
            f"run.folder={folder} has room for {_show_mib(free)} MiB, and the adapter takes "
            f"{_show_mib(num_bytes)}. Free space there, or set run.folder to a folder on another disk."
        )
    elif limit != resource.RLIM_INFINITY and limit < file_bytes:
        problem = (
            f"run.folder={folder} will get a file of {file_bytes / 2**20:,.1f} MiB, and this process may write files "
            f"of at most {limit / 2**20:,.1f} (ulimit -f). Start the run after `ulimit -f unlimited`, or lower lora.r."
        )
    problem = processes.first_error(problem)
    if problem is not None:
        raise RunFolderError(problem)


def _show_mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.1f}" if mib >= 1 else f"{mib:.2g}"


def close_run_folder() -> None:
    """Stop the log and give up the lock. Safe to call when no folder is open."""
    stop_log()
    while _locks:
        _locks.pop().close()


def _describe_environment(processes: Processes) -> dict[str, Any]:
    """Command, commit, versions and hardware: what one needs to repeat the run or to report a bug."""
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
    """A context for writing to the run folder, in which a failure to write is raised as an error of the user's.

    Raises:
        RunFolderError: the folder may not be written to, is read-only, or is full. The message names the setting.
    """
    try:
        yield
    except Exception as error:
        if not is_write_error(error):
            raise
        raise RunFolderError(
            f"run.folder={folder} can't be written: {disk_reason(error)}. Free space there, or set run.folder to a "
            "folder that you may write to."
        ) from error


def _lock(folder: Path) -> None:
    """Keep other runs out of the folder until `close_run_folder` or the end of this process. Only rank 0 calls this."""
    file = open_to_append(folder / LOCK)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.seek(0)
            other = file.read().strip() or "another run"
            raise RunFolderError(
                f"run.folder={folder} is in use: {other} is writing to it. Stop that run, or set another run.name or "
                "run.folder."
            ) from None
        except OSError:
            return  # the file system has no locks
        file.truncate(0)
        file.write(f"{holder()}\n")
        file.flush()
        _locks.append(file)
        return


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the working folder, or else of the clone that the package runs from; None without git."""
    for folder in (Path.cwd(), Path(__file__).parent):
        with suppress(OSError):
            command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout.strip()
    return None
