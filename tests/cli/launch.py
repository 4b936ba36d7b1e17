"""Start the real command line as a user does, and look at it from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil
import torch

import qlora_fsdp
from qlora_fsdp import train
from qlora_fsdp.__main__ import command as command_line
from qlora_fsdp.runtime import watch
from tests.helpers.quick_config import composing_quickly
from tests.helpers.ranks import StartedRanks, start_process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "bin" / "qlora-fsdp"  # the command of its own
GUARD = ROOT / "tests" / "helpers" / "guard"
SHORT_STEPS = ["training.micro_batch_size=1", "training.global_batch_size=null"]  # a sequence a rank
LAUNCHERS = {
    "qlora-fsdp": [str(SCRIPT), "train"],
    "python": ["-m", "qlora_fsdp.train"],
    "chat": ["-m", "qlora_fsdp.chat"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "qlora_fsdp.train"],
    "accelerate with a restart": [
        *("-m", "accelerate.commands.launch", "--max_restarts", "1"),
        *("--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"), "-m", "qlora_fsdp.train"),
    ],
    "accelerate": [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml"), "-m", "qlora_fsdp.train"),
    ],
    "accelerate_gpus": [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / "accelerate_configs" / "one_node.yaml"), "-m", "qlora_fsdp.train"),
    ],
}


def child_environment(gpus: bool = False) -> dict[str, str]:
    """The variables of a process that a test starts: it finds this package, and is told nothing of other runs.

    It unpickles nothing of a peer (tests/helpers/guard).

    Args:
        gpus: let it have every GPU that there is; else it sees none.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_"))}
    paths = [str(GUARD), str(Path(qlora_fsdp.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return own if gpus else own | {"CUDA_VISIBLE_DEVICES": ""}


class Command:
    """A command that runs; its output goes to a file, so that nobody has to read it for it to go on."""

    output_file: Path
    run_folder: Path

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        raise NotImplementedError

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """Our messages: what follows `Error: ` or begins with `Interrupted by `, up to the launcher's own output."""
        start = r"^(?:Error: |(?=Interrupted by ))"
        return re.findall(rf"{start}(.+?)(?={start}|^[EW]\d{{4}} |\Z)", self.output, flags=re.MULTILINE | re.DOTALL)

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_folder / "summary.json").read_text()))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self.poll() is not None and not condition()):
                self.kill()
                raise AssertionError(f"{what}: not so within {seconds:.0f} s. The output is:\n{self.output}")
            time.sleep(0.2)

    def wait_for_steps(self, num_steps: int = 2) -> None:
        file = self.run_folder / "metrics.jsonl"
        self.wait_for(lambda: file.exists() and file.read_text().count("\n") >= num_steps, f"{num_steps} steps")

    def finish(self) -> int:
        """Wait for the end; the exit code."""
        self.wait_for(lambda: self.poll() is not None, "an end")
        exit_code = self.poll()
        assert exit_code is not None
        return exit_code


class Launch(Command):
    """A process of its own, as a user starts it.

    Args:
        folder: for the output, and the run's folder.
        launcher: a key of LAUNCHERS.
        arguments: of qlora_fsdp.train.
        environment: variables besides this process's own.
        gpus: let the command have every GPU that there is; else it runs on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        launcher: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        gpus: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output_file, self.run_folder = folder / "output.txt", folder / "run"
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher], f"run.folder={self.run_folder}", *arguments],
                env=child_environment(gpus) | (environment or {}),
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def rank(self, rank: int) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                return process
        raise AssertionError(f"no rank {rank} in:\n{self.output}")

    def kill(self) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.send_signal(signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def check_message_alone(command: Launch, message: str) -> None:
    """See that a command of `qlora-fsdp` has ended with this message: one line, the last on the screen."""
    before, _, last = command.output.rpartition("\n\n")
    assert last.startswith(message) and last.count("\n") == 1, command.output
    assert before.startswith("qlora-fsdp ") and "Traceback" not in before and "Error" not in before, command.output


class ForkedLaunch(Command):
    """The same command on ranks that have the libraries already (tests/helpers/ranks.py): 10 seconds less for each.

    Args:
        folder: for the output, and the run's folder.
        num_ranks: processes; their exit code is rank 0's.
        arguments: of qlora_fsdp.train.
        preexec: called in each before it starts.
        gpus: let each have a GPU, where starting it takes as long as ever; else they run on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        *arguments: str,
        preexec: Callable[[], None] | None = None,
        gpus: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output_file, self.run_folder = folder / "output.txt", folder / "run"
        self.output_file.touch()
        argv = [f"run.folder={self.run_folder}", *arguments]
        self.ranks = StartedRanks([self.output_file] * num_ranks, _run_main, folder, argv, preexec, gpu=gpus)

    def poll(self) -> int | None:
        exit_codes = [process.exitcode for process in self.ranks.processes]
        return None if None in exit_codes else exit_codes[0]

    def rank(self, rank: int) -> psutil.Process:
        return psutil.Process(self.ranks.processes[rank].pid)

    def kill(self) -> None:
        self.ranks.kill()


def run_forked(
    folder: Path, *command: str, text: str = "", preexec: Callable[[], None] | None = None
) -> tuple[int, str]:
    """`qlora-fsdp COMMAND ...` to its end, in a process that has the libraries already: 5 seconds less than a new one.

    Args:
        folder: the working folder.
        command: its name and arguments.
        text: what is typed into it.
        preexec: called before it starts.

    Returns:
        Its exit code, and what it printed on stdout and stderr.
    """
    with TemporaryDirectory() as own:
        typed, printed = Path(own) / "typed", Path(own) / "printed"
        typed.write_text(text)
        process = start_process(_run_command, folder, command, (typed, printed), child_environment(), preexec)
        process.join()
        assert process.exitcode is not None
        return process.exitcode, printed.read_text(errors="replace")


def _run_command(
    folder: Path,
    argv: tuple[str, ...],
    files: tuple[Path, Path],
    environment: dict[str, str],
    preexec: Callable[[], None] | None,
) -> NoReturn:
    typed, printed = files
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    if preexec is not None:
        preexec()
    # multiprocessing has closed stdin, and stdout knows the server's file, not what it is now: perhaps a pipe
    sys.stdin, sys.stdout, sys.argv = open(0), open(1, "w", closefd=False), ["qlora-fsdp", *argv]  # noqa: SIM115
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    torch.set_num_threads(1)
    with composing_quickly():
        command_line()


def _run_main(folder: Path, argv: list[str], preexec: Callable[[], None] | None) -> NoReturn:
    # As under torchrun, the store outlives the ranks: they meet where they were told that they run.
    os.environ |= {"MASTER_PORT": os.environ["MEETING_PORT"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Where a rank waits for one that has failed, it ends as with the usual times (which `Launch` has), but sooner.
    watch.POLL_SECONDS, watch.UNWIND_SECONDS = 0.1, 1.0
    os.chdir(folder)
    if preexec is not None:
        preexec()
    with composing_quickly():
        sys.exit(train.main(argv))
