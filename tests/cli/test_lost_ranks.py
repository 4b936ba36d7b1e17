"""When a rank fails, dies, hangs or is told to stop, all stop soon, and one message says which and why."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.launch import Launch

pytestmark = pytest.mark.distributed

LONG_RUN = ["model=tiny", "data=random", "training.max_length=64", "training.max_steps=100000"]


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and the process that the test did something to."""

    exit_code: int
    launch: Launch
    pid: int = 0

    @property
    def message(self) -> str:
        """The one message."""
        assert len(self.launch.errors) == 1, self.launch.output
        return self.launch.errors[0]


def kill(folder: Path, launcher: str, victim: int) -> Ended:
    launch = Launch(folder, launcher, *LONG_RUN)
    launch.wait_for_steps()
    process = launch.rank(victim)
    process.kill()
    return Ended(launch.finish(180), launch, process.pid)


def freeze(folder: Path) -> Ended:
    launch = Launch(folder, "torchrun", *LONG_RUN, "distributed.timeout_seconds=8")
    launch.wait_for_steps()
    process = launch.rank(1)
    process.suspend()
    launch.wait_for(lambda: bool(launch.errors), "a message", 60)
    process.kill()  # torchrun does it too, after 30 s
    return Ended(launch.finish(), launch, process.pid)


def interrupt(folder: Path, launcher: str, number: signal.Signals) -> Ended:
    launch = Launch(folder, launcher, *LONG_RUN)
    launch.wait_for_steps()
    launch.process.send_signal(number)
    return Ended(launch.finish(120), launch)


def fail_on_rank_1(folder: Path, model: Path, rows: Path, is_there: bool) -> Ended:
    """Rank 1's own model folder is cut short, or is not there, which the configuration's check finds already."""
    shutil.copytree(model, folder / "model0")
    if is_there:
        shutil.copytree(model, folder / "model1")
        (folder / "model1" / "model-00001-of-00003.safetensors").write_bytes(b"")
    data = ["model.tokenizer_path=bytes", f"data.path={rows}", f"data.cache_folder={rows.parent}"]
    launch = Launch(folder, "torchrun", f"model.path={folder}/model${{oc.env:RANK}}", *data)
    return Ended(launch.finish(180), launch)


def fill_disk(folder: Path, model: Path) -> Ended:
    def limit_files() -> None:  # a write beyond fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))

    data = ["model.tokenizer_path=bytes", "data=random", "training.max_length=32", "training.max_steps=1"]
    launch = Launch(folder, "python", f"model.path={model}", "lora.r=64", *data, preexec=limit_files)
    return Ended(launch.finish(180), launch)


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path], rows: Path
) -> dict[str, Future[Ended]]:
    """Every case; two run at a time."""
    folder, model = tmp_path_factory.mktemp("lost"), checkpoint("llama")
    with ThreadPoolExecutor(2) as pool:
        return {
            "rank 0 killed": pool.submit(kill, folder / "0", "torchrun", 0),
            "rank 1 killed": pool.submit(kill, folder / "1", "accelerate", 1),
            "rank 1 frozen": pool.submit(freeze, folder / "2"),
            "SIGINT": pool.submit(interrupt, folder / "3", "python", signal.SIGINT),
            "SIGTERM": pool.submit(interrupt, folder / "4", "torchrun", signal.SIGTERM),
            "rank 1 has no model": pool.submit(fail_on_rank_1, folder / "5", model, rows, is_there=False),
            "rank 1 has half a model": pool.submit(fail_on_rank_1, folder / "6", model, rows, is_there=True),
            "disk full": pool.submit(fill_disk, folder / "7", model),
        }


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named(ended: dict[str, Future[Ended]], rank: int) -> None:
    run = ended[f"rank {rank} killed"].result()
    assert run.exit_code != 0
    assert run.message.startswith(f"rank {rank} is gone: process {run.pid} ")
    assert run.launch.summary["status"] == "failed"
    assert f"rank {rank} is gone" in run.launch.summary["error"]
    assert (run.launch.run_folder / "metrics.jsonl").read_text().count("\n") >= 2


def test_frozen_rank_is_named_after_the_timeout(ended: dict[str, Future[Ended]]) -> None:
    run = ended["rank 1 frozen"].result()
    assert run.exit_code != 0
    assert run.message.startswith(f"rank 1 does not answer: process {run.pid} ")
    assert run.launch.summary["status"] == "failed"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_interrupted_run_says_so(ended: dict[str, Future[Ended]], number: signal.Signals, exit_code: int) -> None:
    run = ended[number.name].result()
    assert run.exit_code == exit_code  # torchrun's own is 1
    assert run.message.startswith(f"Interrupted by {number.name}.")
    assert run.launch.summary["status"] == "interrupted"
    assert "qlora_fsdp/run.py" not in run.launch.output, "a rank's traceback"


@pytest.mark.parametrize("case", ["rank 1 has no model", "rank 1 has half a model"])
def test_error_of_one_rank_stops_all(ended: dict[str, Future[Ended]], case: str) -> None:
    run = ended[case].result()
    assert run.exit_code != 0
    assert run.message.startswith("rank 1: model.path=")
    assert "qlora_fsdp/run.py" not in run.launch.output, "a rank's traceback"


def test_full_disk_is_named_and_leaves_no_half_adapter(ended: dict[str, Future[Ended]]) -> None:
    run = ended["disk full"].result()
    assert run.exit_code == 2
    assert f"run.folder={run.launch.run_folder} can't be written" in run.message
    assert run.launch.summary["status"] == "failed"
    files = {file.name for file in run.launch.run_folder.iterdir()}
    records = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "train.log"}
    assert files == {".attempt", ".lock"} | records
