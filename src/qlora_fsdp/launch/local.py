"""Runs jobs on this host by one `accelerate launch` each, `launch.parallel` of them at a time. Imports no torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from qlora_fsdp.common.errors import Interrupted
from qlora_fsdp.common.files import create, disk_reason
from qlora_fsdp.common.startup import PARENT_PID
from qlora_fsdp.common.terminal import say
from qlora_fsdp.common.text import show_duration
from qlora_fsdp.launch.ranks import Slot, divide_gpus, kill_tree, launch_command, noting_signals, signal_ranks
from qlora_fsdp.launch.sweep import Job, Sweep
from qlora_fsdp.records.run_state import CONSOLE_FILE, RunState
from qlora_fsdp.runtime.run_command import print_result

POLL_SECONDS = 0.3
LINE_SECONDS = 30.0  # between two lines about a job's progress


@dataclass
class _Running:
    job: Job
    number: int
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    last_line: float = field(default_factory=time.monotonic)


def run_jobs(jobs: list[Job], sweep: Sweep) -> None:
    """Runs jobs to their end, each on GPUs of its own. One that fails does not stop the others.

    Raises:
        ConfigError: there are too few GPUs.
        Interrupted: by a signal, after which the running jobs have saved and ended. A second signal kills them.
    """
    if not jobs:
        return
    config = jobs[0].config
    slots = divide_gpus(config.launch, os.environ)
    if config.launch.dry_run:
        for job in jobs:
            gpus = f"CUDA_VISIBLE_DEVICES={','.join(slots[0])} " if slots[0] is not None else ""
            print_result(gpus + shlex.join(launch_command(job.config.launch, slots[0], job.arguments)))
        return
    waiting = deque(enumerate(jobs, start=1))
    running: list[_Running] = []
    with noting_signals() as signals:
        num_passed_on = 0
        while running or (waiting and not signals):
            while waiting and slots and not signals:
                number, job = waiting.popleft()
                try:
                    running.append(_start(job, number, len(jobs), slots[0]))
                except OSError as error:  # the disk may be full, and other jobs still run
                    say(f"[{number}/{len(jobs)}] {job.label}: can't be started: {disk_reason(error)}")
                else:
                    del slots[0]
            time.sleep(POLL_SECONDS)
            if len(signals) > num_passed_on:
                num_passed_on = len(signals)
                _pass_on(signals, running)
            for item in list(running):
                if item.process.poll() is not None:
                    running.remove(item)
                    slots.append(item.slot)
                    _say(item, len(jobs), _ending(item))
                elif time.monotonic() - item.last_line > LINE_SECONDS:
                    item.last_line = time.monotonic()
                    _say(item, len(jobs), _progress(item.job.state))
    if signals:
        raise Interrupted(signals[0], f"The same command goes on with what is unfinished in {sweep.folder}.")


def _start(job: Job, number: int, num_jobs: int, slot: Slot) -> _Running:
    environment = os.environ | {PARENT_PID: str(os.getpid())}
    if slot is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot[: job.config.launch.num_processes])
    job.folder.mkdir(parents=True, exist_ok=True)
    console = job.folder / CONSOLE_FILE
    with create(console) as output:
        process = subprocess.Popen(
            launch_command(job.config.launch, slot, job.arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the ranks through us, once
        )
    item = _Running(job, number, slot, process)
    gpus = f" on GPU {environment['CUDA_VISIBLE_DEVICES']}" if slot is not None else ""
    _say(item, num_jobs, f"started{gpus}; its output is in {console}")
    return item


def _ending(item: _Running) -> str:
    state = item.job.state
    seconds = show_duration(time.monotonic() - item.started)
    if state.status == "finished":
        loss = "" if state.compared is None else f", {state.compared_by} {state.compared:.4f}"
        return f"finished in {seconds}{loss}"
    error = state.error or _last_error(item) or f"exit code {item.process.returncode}"
    reason = error.partition("\n")[0]
    what = "interrupted" if state.status == "interrupted" else "failed"
    return f"{what} after {seconds}: {reason}"


def _last_error(item: _Running) -> str | None:
    """The error of a job that ended before it had a run folder."""
    with suppress(OSError):
        lines = (item.job.folder / CONSOLE_FILE).read_text(errors="replace").splitlines()
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        if errors:
            return errors[-1]
        return next((line for line in reversed(lines) if line.strip()), None)
    return None


def _progress(state: RunState) -> str:
    if state.step is None or state.loss is None:
        return "is being set up"
    left = f", ETA {show_duration(state.eta_seconds)}" if state.eta_seconds is not None else ""
    return f"step {state.step}/{state.num_steps}, loss {state.loss:.4f}{left}"


def _say(item: _Running, num_jobs: int, text: str) -> None:
    say(f"[{item.number}/{num_jobs}] {item.job.label}: {text}")


def _pass_on(signals: list[int], running: list[_Running]) -> None:
    """Asks the ranks to save and stop at the first signal, and kills them at another one."""
    is_first = len(signals) == 1
    if is_first:
        say("\nThe running jobs save and stop; once more kills them.")
    for item in running:
        if not (is_first and signal_ranks(item.process.pid, signals[0])):
            kill_tree(item.process.pid)
