"""The real command line on all GPUs: a rank that dies or hangs under NCCL, and a run that is stopped and goes on."""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.cli.launch import Launch

NUM_RANKS = torch.cuda.device_count()
RUN = ["model=tiny", "data=random", "training.max_length=64", "training.max_steps=400"]
ENDLESS = [*RUN[:-1], "training.max_steps=100000"]
needs_two = pytest.mark.skipif(NUM_RANKS < 2, reason="needs two GPUs")


def losses(launch: Launch) -> list[float]:
    lines = (launch.run_folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def kill(folder: Path) -> tuple[Launch, int]:
    launch = Launch(folder, "accelerate_gpus", *ENDLESS, gpus=True)
    launch.wait_for_steps()
    process = launch.rank(NUM_RANKS - 1)
    process.kill()
    launch.finish()
    return launch, process.pid


def freeze(folder: Path) -> tuple[Launch, int]:
    launch = Launch(folder, "accelerate_gpus", *ENDLESS, "distributed.timeout_seconds=10", gpus=True)
    launch.wait_for_steps()
    process = launch.rank(NUM_RANKS - 1)
    process.suspend()
    launch.wait_for(lambda: bool(launch.errors), "a message", 90)
    process.kill()
    launch.finish()
    return launch, process.pid


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

    with ThreadPoolExecutor(4) as pool:
        return {
            "straight": pool.submit(straight),
            "stopped": pool.submit(stop_and_go_on, folder / "stopped"),
            "killed": pool.submit(kill, folder / "killed") if NUM_RANKS > 1 else Future(),
            "frozen": pool.submit(freeze, folder / "frozen") if NUM_RANKS > 1 else Future(),
        }


@needs_two
@pytest.mark.parametrize(("case", "verb"), [("killed", "is gone"), ("frozen", "does not answer")])
def test_lost_rank_is_named(ended: dict[str, Future], case: str, verb: str) -> None:
    launch, pid = ended[case].result()
    assert launch.process.returncode != 0
    assert len(launch.errors) == 1, launch.output
    assert launch.errors[0].startswith(f"rank {NUM_RANKS - 1} {verb}: process {pid} ")
    assert launch.summary["status"] == "failed"


def test_stopped_run_goes_on_as_if_it_had_not_stopped(ended: dict[str, Future]) -> None:
    straight, stopped = ended["straight"].result(), ended["stopped"].result()
    assert straight.summary["status"] == stopped.summary["status"] == "finished", stopped.output
    assert straight.summary["num_ranks"] == NUM_RANKS
    assert "Going on from step " in stopped.output
    assert len(losses(stopped)) == 400
    assert losses(stopped) == pytest.approx(losses(straight), rel=1e-3)
