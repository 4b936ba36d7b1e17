"""`train(settings)` of the package: `qlora-fsdp train` from a script or a notebook.

The run has processes of its own, as from a shell: a rank for each GPU. A notebook's own process could be one rank at
most, would keep the run's memory, and a killed run would take it along.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from qlora_fsdp.common.errors import LaunchError, UserError, refuse
from qlora_fsdp.common.startup import PARENT_PID, is_rank
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.records.run_state import RunState, read_run
from qlora_fsdp.records.start_folder import find_start

ERROR = "Error: "  # what a command's message begins with


class RunFailed(UserError):
    """A run that was started from Python has failed. Its message is what the run printed.

    Attributes:
        exit_code: the command's (docs/errors.md).
        run: the run as its folder shows it.
    """

    def __init__(self, message: str, exit_code: int, run: RunState) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.run = run


def train_from_python(settings: Mapping[str, Any] | str | Path, quiet: bool = False) -> RunState:
    """Trains an adapter on all GPUs of this host, as `qlora-fsdp train` does, and waits for the end.

    Args:
        settings: a file that `--config` takes, or what would stand in one: settings by their dotted keys
            (`{"model": "llama3-8b", "data": "chats.jsonl", "lora.r": 32}`) or by sections (`{"lora": {"r": 32}}`).
        quiet: print nothing. The run folder's train.log has it.

    Returns:
        The finished run: its folder, losses and adapter. Where `checkpoint.resume` finds a checkpoint in the folder,
        the run goes on from there, as the command does.

    Raises:
        ConfigError: settings can't be used. Nothing was started.
        LaunchError: this process is a rank itself.
        RunFailed: the run has started and failed.
        KeyboardInterrupt: by Ctrl-C or a notebook's stop button, after the ranks have saved. The same call
            goes on from there.
    """
    if is_rank(os.environ):
        raise LaunchError("train() starts ranks, and this process is already one. Call it in a plain Python process.")
    given = nullcontext(str(settings)) if isinstance(settings, (str, Path)) else TemporaryDirectory(prefix="settings-")
    with given as place:
        file = Path(place).expanduser().absolute()
        if not isinstance(settings, (str, Path)):
            file = file / "settings.yaml"
            file.write_text(yaml.safe_dump(_plain(settings), sort_keys=False, allow_unicode=True), encoding="utf-8")
        typed = ["--config", str(file)]
        config = load_config(typed, check_run, launches=True, find_start=find_start)
        refuse(check_run(config))
        folder = Path(config.run.folder).expanduser().absolute()
        exit_code, message = _run([*typed, f"run.folder={folder}"], quiet)
    run = read_run(folder)
    if exit_code:
        reason = message or run.error or f"the exit code is {exit_code}"
        raise RunFailed(f"The run in {folder} has failed: {reason}", exit_code, run)
    return run


def _plain(value: Any) -> Any:
    """A value as YAML has it: paths and members of enums become text, tuples and sets lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value


def _run(arguments: list[str], quiet: bool) -> tuple[int, str]:
    """Runs the command to its end, and shows what it prints where Python prints: in a notebook, below the cell.

    Returns:
        Its exit code, and its last message, empty without one.
    """
    command = [sys.executable, "-m", "qlora_fsdp", "train", *arguments]
    environment = os.environ | {PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches the ranks through us, once
    )
    assert process.stdout is not None
    message: list[str] = []
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            for line in process.stdout:
                if line.startswith(ERROR):
                    message = []
                if line.startswith(ERROR) or message:
                    message.append(line.removeprefix(ERROR))
                if not quiet:
                    print(line, end="", flush=True)
            exit_code = process.wait()
            break
        except KeyboardInterrupt as error:
            interrupt = error
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
    if interrupt is not None:
        raise interrupt
    return exit_code, "".join(message).strip()
