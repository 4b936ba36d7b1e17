"""Starts the ranks of one command on this host, and passes signals on to them. Imports neither torch nor accelerate.

Three kinds of processes take part. This one, which the user started, waits. Below it `run_accelerate.py` is
accelerate's launcher, and below that are the ranks. Launcher and ranks have a session of their own, so that Ctrl-C
reaches the ranks through this process alone, and they save: the launcher would soon kill them.

The command that starts a job, and the GPUs it may have. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import psutil

from qlora_fsdp.common.errors import ConfigError, Interrupted, Problem, RankError, UserError, print_error, refuse
from qlora_fsdp.common.files import shipped_file
from qlora_fsdp.common.nvidia_smi import query_gpus
from qlora_fsdp.common.startup import NO_RUN, PARENT_PID, announce
from qlora_fsdp.config.checks.check_launch import read_accelerate_file
from qlora_fsdp.config.checks.check_settings import check_settings
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import Config, LaunchConfig
from qlora_fsdp.config.settings import problem_about, problem_with
from qlora_fsdp.config.world import World
from qlora_fsdp.runtime.run_command import print_result
from qlora_fsdp.runtime.signals import SIGNALS

POLL_SECONDS = 0.2
PASSED_ON = 2  # so many SIGINT reach the ranks: the first lets them save, the second stops them; another kills them
Slot = list[str] | None  # names of the GPUs that a job may see; None where there are no GPUs


@dataclass(frozen=True)
class Plan:
    """The ranks that a command starts on this host.

    Attributes:
        number: how many; None if a file of accelerate's says so.
        slot: their GPUs; None where there is none.
    """

    number: int | None
    slot: Slot

    @property
    def world(self) -> World:
        """What a configuration has to fit."""
        number = self.number or 1
        return World(number, local_num_ranks=number)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that show the ranks their GPUs."""
        return {} if self.slot is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.slot)}


def plan_ranks(launch: LaunchConfig, environ: Mapping[str, str]) -> Plan:
    """Returns what `launch` asks for: without a number, a rank for each GPU, or one where there is none.

    Raises:
        ConfigError: there are too few GPUs, or settings of `launch` can't be used for one command.
    """
    if launch.parallel > 1:
        refuse([problem_with(launch, "launch.parallel", "is for sweeps.", "Add -m, or leave it out.")])
    (slot,) = divide_gpus(launch, environ)
    return Plan(count_ranks(launch, slot), slot)


def start_command(module: str, argv: Sequence[str]) -> int:
    """Starts a command beside training on several ranks, as the settings of `launch` among its arguments say.

    Returns:
        The exit code: that of the ranks, or of the `UserError` that has been printed.
    """
    try:
        typed = [text for text in argv if _is_of_launch(text)]
        config = load_config(typed, _check_launch, launches=True)
        refuse(_check_launch(config))
        return start_ranks(module, argv, config.launch, plan_ranks(config.launch, os.environ))
    except UserError as error:
        print_error(error)
        return error.exit_code


def start_ranks(module: str, arguments: Sequence[str], launch: LaunchConfig, plan: Plan) -> int:
    """Starts a command on several ranks and waits for their end.

    Args:
        module: what each rank runs, e.g. `qlora_fsdp.train`.
        arguments: its command line, of which the settings of `launch` are left out.
        launch: how many ranks there are, and what accelerate is told.
        plan: the ranks.

    Returns:
        The exit code of the rank that failed, which has printed why; 0 if none has.

    Raises:
        Interrupted: by a signal before there were ranks, or once too often.
        RankError: the launcher was killed.
    """
    rest = [text for text in arguments if not _is_of_launch(text)]
    command = launch_command(launch, plan.slot, rest, module)
    if launch.dry_run:
        print_result(shlex.join([*(f"{name}={value}" for name, value in plan.environment.items()), *command]))
        return 0
    announce(plan.number)
    environment = os.environ | plan.environment | {PARENT_PID: str(os.getpid())}
    with noting_signals() as signals:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        exit_code = _wait(process, signals)
    if exit_code >= 0:
        return exit_code
    name = signal.Signals(-exit_code).name
    raise RankError(f"The launcher of the ranks was killed by {name}, perhaps for want of memory. They save and stop.")


def _wait(process: subprocess.Popen[bytes], signals: list[int]) -> int:
    """Wait for the launcher's exit code, and pass on the signals that arrive meanwhile.

    Raises:
        Interrupted: by a signal that the ranks could not answer, so that they were killed.
    """
    num_passed_on = 0
    killed_because = ""
    had_ranks = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(POLL_SECONDS)
            break
        had_ranks = had_ranks or bool(_ranks(process.pid))
        for number in signals[num_passed_on:]:
            num_passed_on += 1
            if signals[:num_passed_on].count(signal.SIGINT) > PASSED_ON:
                kill_tree(process.pid)
                killed_because = "The ranks were killed."
            elif not signal_ranks(process.pid, number) and not had_ranks:  # else they have ended, and it ends soon
                kill_tree(process.pid)
                killed_because = NO_RUN
    if exit_code < 0 and killed_because:
        raise Interrupted(signals[0], killed_because)
    return exit_code


def _check_launch(config: Config) -> list[Problem]:
    return [problem for problem in check_settings(config) if _is_of_launch(problem.setting)]


def _is_of_launch(text: str) -> bool:
    return text.lstrip("+").startswith("launch.")


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Collects the signals that arrive meanwhile in a list, and keeps them from doing anything else."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_ranks(pid: int, number: int) -> bool:
    """Signals the ranks below a launcher, but not the launcher, which would soon kill them.

    Returns:
        Whether there are any: none before they have been started, nor after they have ended.
    """
    ranks = _ranks(pid)
    for process in ranks:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return bool(ranks)


def kill_tree(pid: int) -> None:
    """Kills a process and all processes below it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def _ranks(pid: int) -> list[psutil.Process]:
    """The processes below a launcher that run a command of ours, without their forked workers."""
    with suppress(psutil.NoSuchProcess):
        found = [process for process in psutil.Process(pid).children(recursive=True) if _is_rank(process)]
        pids = {process.pid for process in found}
        return [process for process in found if process.ppid() not in pids]
    return []


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()[:5]
        return any(a == "-m" and b.startswith("qlora_fsdp.") for a, b in pairwise(words))
    return False


def launch_command(
    launch: LaunchConfig, slot: Slot, arguments: Sequence[str], module: str = "qlora_fsdp.train"
) -> list[str]:
    """Returns the command that starts the ranks of a job on this host: `accelerate launch`, with endings of our own."""
    own = None if launch.config_file is None else Path(launch.config_file).expanduser()
    options = ["--config_file", str(own or shipped_file("accelerate_configs/one_node.yaml"))]
    if (num_ranks := count_ranks(launch, slot)) is not None:
        options += ["--num_processes", str(num_ranks)]
    if own is None or not _names_machines(own):
        options += ["--main_process_port", "0"]  # any free port, because jobs run side by side
    return [sys.executable, "-m", "qlora_fsdp.launch.run_accelerate", *options, "-m", module, *arguments]


def count_ranks(launch: LaunchConfig, slot: Slot) -> int | None:
    """Returns how many ranks a job has on its GPUs; None if a file of accelerate's says so."""
    if launch.num_processes:
        return launch.num_processes
    if launch.config_file is not None:
        return None
    return len(slot) if slot else 1


def _names_machines(file: Path) -> bool:
    """Whether a file of accelerate's is about several machines, which have to agree on a port."""
    try:
        number = read_accelerate_file(file).get("num_machines")
    except ValueError:
        return False  # the check of settings says what is wrong with it
    return isinstance(number, int) and number > 1


def divide_gpus(launch: LaunchConfig, environ: Mapping[str, str]) -> list[Slot]:
    """Returns the GPUs of each of the jobs that run at the same time. No two jobs share a GPU.

    Raises:
        ConfigError: there are too few.
    """
    gpus = _visible_gpus(environ)
    if not gpus:
        return [None] * launch.parallel
    size = max(1, launch.num_processes or len(gpus) // launch.parallel)
    num_needed = size * launch.parallel
    if num_needed > len(gpus):
        if launch.parallel == 1:
            fix = "Set it lower, or make more visible through CUDA_VISIBLE_DEVICES."
            reason = f"is more than {len(gpus)} GPUs."
            raise ConfigError([problem_about("launch.num_processes", launch.num_processes, reason, fix)])
        reason = f"needs {num_needed} GPUs at {size} a job, and there are {len(gpus)}."
        fix = "Set launch.parallel or launch.num_processes lower."
        raise ConfigError([problem_about("launch.parallel", launch.parallel, reason, fix)])
    return [gpus[size * index : size * (index + 1)] for index in range(launch.parallel)]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    return [index for (index,) in query_gpus("index")]
