"""The real command line on all GPUs: a rank that dies or hangs under NCCL, and a run that is stopped and goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.cli.launch import SHORT_STEPS, Command, ForkedLaunch, Launch
from tests.cli.stages import at_stage

NUM_RANKS = torch.cuda.device_count()
RUN = ["model=tiny", "data=random", *SHORT_STEPS, "training.max_length=64", "training.max_steps=400"]
ENDLESS = [*RUN[:-1], "training.max_steps=100000"]
SHORT_TIMEOUT = ["distributed.timeout_seconds=10"]
needs_two = pytest.mark.skipif(NUM_RANKS < 2, reason="needs two GPUs")


def losses(launch: Launch) -> list[float]:
    lines = (launch.run_folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def kill(folder: Path) -> tuple[Command, int]:
    launch = Launch(folder, "accelerate_gpus", *ENDLESS, gpus=True)
    launch.wait_for_steps()
    process = launch.rank(NUM_RANKS - 1)
    process.kill()
    launch.finish()
    return launch, process.pid


def freeze(folder: Path) -> tuple[Command, int]:
    launch = Launch(folder, "accelerate_gpus", *ENDLESS, *SHORT_TIMEOUT, gpus=True)
    launch.wait_for_steps()
    process = launch.rank(NUM_RANKS - 1)
    process.suspend()
    launch.wait_for(lambda: bool(launch.errors), "a message")
    process.kill()  # the launcher does it too, after 30 s
    launch.finish()
    return launch, process.pid


def freeze_in_load(folder: Path) -> tuple[Command, int]:
    """The others then wait in the first call of NCCL, which makes the communicator."""
    command = ForkedLaunch(folder, NUM_RANKS, *ENDLESS, *SHORT_TIMEOUT, preexec=prepare_to_freeze, gpus=True)
    process = command.rank(NUM_RANKS - 1)
    command.wait_for(lambda: bool(command.errors), "a message")
    process.kill()
    command.finish()
    return command, process.pid


def prepare_to_freeze() -> None:
    if os.environ["RANK"] == str(NUM_RANKS - 1):
        at_stage("load", 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def hang(folder: Path) -> tuple[Command, int]:
    """The last rank's main thread waits for something that never comes, while its other threads live."""
    command = ForkedLaunch(folder, NUM_RANKS, *ENDLESS, *SHORT_TIMEOUT, preexec=prepare_to_hang, gpus=True)
    process = command.rank(NUM_RANKS - 1)
    command.finish()
    return command, process.pid


def prepare_to_hang() -> None:
    if os.environ["RANK"] == str(NUM_RANKS - 1):
        at_stage("forward", 3, threading.Event().wait)


def stop_and_go_on(folder: Path) -> Launch:
    first = Launch(folder, "accelerate_gpus", *RUN, gpus=True)
    first.wait_for_steps(20)
    first.rank(NUM_RANKS - 1).send_signal(signal.SIGTERM)
    first.finish()
    assert first.summary["status"] == "interrupted", first.output
    second = Launch(folder, "accelerate_gpus", *RUN, gpus=True)
    second.finish()
    return second


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future]:
    """Every case, all at the same time: a tiny model leaves room on a GPU."""
    folder = tmp_path_factory.mktemp("runs")

    def straight() -> Launch:
        launch = Launch(folder / "straight", "accelerate_gpus", *RUN, gpus=True)
        launch.finish()
        return launch

    cases = {"straight": straight, "stopped": partial(stop_and_go_on, folder / "stopped")}
    if NUM_RANKS > 1:
        cases |= {name: partial(act, folder / str(number)) for number, (name, act) in enumerate(LOST.items())}
    with ThreadPoolExecutor(6) as pool:
        return {name: pool.submit(act) for name, act in cases.items()}


LOST = {"killed": kill, "frozen": freeze, "frozen in load": freeze_in_load, "hangs": hang}


@needs_two
@pytest.mark.parametrize("case", LOST)
def test_lost_rank_is_named(ended: dict[str, Future], case: str) -> None:
    command, pid = ended[case].result()
    assert command.poll() != 0
    assert len(command.errors) == 1, command.output
    verb = "is gone" if case == "killed" else "does not answer"
    assert command.errors[0].startswith(f"rank {NUM_RANKS - 1} {verb}: process {pid} ")
    assert case == "killed" or "Watchdog caught collective operation timeout" not in command.output, "NCCL came first"
    assert command.summary["status"] == "failed"


def test_stopped_run_goes_on_as_if_it_had_not_stopped(ended: dict[str, Future]) -> None:
    straight, stopped = ended["straight"].result(), ended["stopped"].result()
    assert straight.summary["status"] == stopped.summary["status"] == "finished", stopped.output
    assert straight.summary["num_ranks"] == NUM_RANKS
    assert "Going on from step " in stopped.output
    assert len(losses(stopped)) == 400
    assert losses(stopped) == pytest.approx(losses(straight), rel=1e-3)
