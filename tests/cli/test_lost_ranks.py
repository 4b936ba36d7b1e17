"""When a rank fails, dies, hangs or is told to stop, all stop soon, and one message says which and why."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from qlora_fsdp.records.run_state import checkpoint_folders
from tests.cli.launch import Command, ForkedLaunch, Launch

pytestmark = pytest.mark.distributed

LONG_RUN = ["model=tiny", "data=random", "training.max_length=64", "training.max_steps=100000"]
EVALUATING = [*LONG_RUN, "data.max_rows=120", "data.eval_fraction=0.9", "training.eval_every_steps=2"]  # of 108 rows
EVALUATING += ["training.micro_batch_size=1", "training.global_batch_size=1"]


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and the process that the test did something to."""

    exit_code: int
    command: Command
    pid: int = 0

    @property
    def message(self) -> str:
        """The one message."""
        assert len(self.command.errors) == 1, self.command.output
        return self.command.errors[0]


def kill(command: Command, victim: int) -> Ended:
    command.wait_for_steps()
    process = command.rank(victim)
    process.kill()
    return Ended(command.finish(), command, process.pid)


def freeze(command: Command) -> Ended:
    command.wait_for_steps()
    process = command.rank(1)
    process.suspend()
    command.wait_for(lambda: bool(command.errors), "a message")
    process.kill()  # torchrun does it too, after 30 s
    return Ended(command.finish(), command, process.pid)


def interrupt(launch: Launch, number: signal.Signals) -> Ended:
    launch.wait_for_steps()
    launch.process.send_signal(number)
    return Ended(launch.finish(), launch)


def interrupt_rank(command: Command, rank: int, number: signal.Signals, num_lines: int = 2) -> Ended:
    command.wait_for_steps(num_lines)
    command.rank(rank).send_signal(number)
    return Ended(command.finish(), command)


def limit_files() -> None:
    """A write beyond fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path], rows: Path
) -> dict[str, Future[Ended]]:
    """Every case: real commands, for what a launcher takes part in, and beside them the others, on forked ranks."""
    folder, model = tmp_path_factory.mktemp("lost"), checkpoint("llama")
    for name in ("none/model0", "half/model0", "half/model1"):
        shutil.copytree(model, folder / name)
    (folder / "half" / "model1" / "model-00001-of-00003.safetensors").write_bytes(b"")
    data = ["model.tokenizer_path=bytes", f"data.path={rows}", f"data.cache_folder={rows.parent}"]
    short = [f"model.path={model}", "model.tokenizer_path=bytes", "data=random", "lora.r=64"]
    short += ["training.max_length=32", "training.max_steps=1"]

    def own_model(kind: str) -> str:
        """Every rank's own folder, of which rank 1's is cut short or not there: the configuration's check sees that."""
        return f"model.path={folder / kind}/model${{oc.env:RANK}}"

    def launch(name: str, *argv: str) -> Launch:
        return Launch(folder / name, "torchrun", *argv)

    def fork(name: str, *argv: str, num_ranks: int = 2, preexec: Callable[[], None] | None = None) -> ForkedLaunch:
        return ForkedLaunch(folder / name, num_ranks, *argv, preexec=preexec)

    def end(command: Command) -> Ended:
        return Ended(command.finish(), command)

    real = {
        "SIGTERM": lambda: interrupt(launch("2", *LONG_RUN), signal.SIGTERM),
        "rank 1 has no model": lambda: end(launch("3", own_model("none"), *data)),
    }
    forked = {
        "rank 0 killed": lambda: kill(fork("0", *LONG_RUN), 0),
        "SIGINT": lambda: interrupt_rank(fork("1", *LONG_RUN, num_ranks=1), 0, signal.SIGINT),
        "rank 1 killed": lambda: kill(fork("4", *LONG_RUN), 1),
        "rank 1 frozen": lambda: freeze(fork("5", *LONG_RUN, "distributed.timeout_seconds=8")),
        "SIGUSR1 on rank 1": lambda: interrupt_rank(fork("6", *LONG_RUN), 1, signal.SIGUSR1),
        "SIGTERM in an evaluation": lambda: interrupt_rank(fork("7", *EVALUATING, num_ranks=1), 0, signal.SIGTERM, 3),
        "rank 1 has half a model": lambda: end(fork("8", own_model("half"), *data)),
        "disk full": lambda: end(fork("9", *short, num_ranks=1, preexec=limit_files)),
    }
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        return {
            case: pool.submit(act) for pool, cases in ((one, real), (another, forked)) for case, act in cases.items()
        }


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named(ended: dict[str, Future[Ended]], rank: int) -> None:
    run = ended[f"rank {rank} killed"].result()
    assert run.exit_code != 0
    assert run.message.startswith(f"rank {rank} is gone: process {run.pid} ")
    assert run.command.summary["status"] == "failed"
    assert f"rank {rank} is gone" in run.command.summary["error"]
    assert (run.command.run_folder / "metrics.jsonl").read_text().count("\n") >= 2


def test_frozen_rank_is_named_after_the_timeout(ended: dict[str, Future[Ended]]) -> None:
    run = ended["rank 1 frozen"].result()
    assert run.exit_code != 0
    assert run.message.startswith(f"rank 1 does not answer: process {run.pid} ")
    assert run.command.summary["status"] == "failed"


# What ends which run, and its exit code; torchrun's own is 1.
SIGNALS = {"SIGINT": 130, "SIGTERM": 1, "SIGUSR1 on rank 1": 138, "SIGTERM in an evaluation": 143}


@pytest.mark.parametrize("case", SIGNALS)
def test_interrupted_run_saves_stops_on_all_ranks_and_says_so(ended: dict[str, Future[Ended]], case: str) -> None:
    run = ended[case].result()
    assert run.exit_code == SIGNALS[case]
    assert run.message.startswith(f"Interrupted by {case.split()[0]}. Step ")
    assert run.command.summary["status"] == "interrupted"
    assert "qlora_fsdp/training/run.py" not in run.command.output, "a rank's traceback"
    (saved,) = checkpoint_folders(run.command.run_folder / "checkpoints")
    lines = map(json.loads, (run.command.run_folder / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "checkpoint_seconds" not in line][-1]
    assert saved.name == f"step-{last['step']:08}" and "eval_loss" not in last
    assert "evaluation" not in case or last["step"] == 2, "the evaluation was not waited for"


@pytest.mark.parametrize("case", ["rank 1 has no model", "rank 1 has half a model"])
def test_error_of_one_rank_stops_all(ended: dict[str, Future[Ended]], case: str) -> None:
    run = ended[case].result()
    assert run.exit_code != 0
    assert run.message.startswith("rank 1: model.path=")
    assert "qlora_fsdp/training/run.py" not in run.command.output, "a rank's traceback"


def test_full_disk_is_named_and_leaves_no_half_adapter(ended: dict[str, Future[Ended]]) -> None:
    run = ended["disk full"].result()
    assert run.exit_code == 2
    assert f"run.folder={run.command.run_folder} can't be written" in run.message
    assert run.command.summary["status"] == "failed"
    files = {file.name for file in run.command.run_folder.iterdir()}
    records = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "train.log"}
    assert files == {".attempt", ".lock"} | records
