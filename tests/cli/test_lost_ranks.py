"""When a rank fails, dies, hangs or is told to stop, all stop soon, and one message says which and why."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from qlora_fsdp.common.errors import RankError
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.runtime import heartbeats
from qlora_fsdp.runtime.processes import PATIENCE
from tests.cli.launch import SHORT_STEPS, Command, ForkedLaunch, Launch
from tests.cli.stages import at_stage
from tests.helpers.ranks import Meeting, be_a_host

pytestmark = pytest.mark.distributed

TINY = ["model=tiny", "model.config.num_hidden_layers=1", "data=random", "training.max_length=64", *SHORT_STEPS]
LONG_RUN = [*TINY, "training.max_steps=100000"]
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


# A rank that stands still: the stage, at which of its calls, how many ranks, and which of them
FROZEN: dict[str, tuple[str, int, int, int]] = {
    "load": ("load", 1, 2, 1),
    "first step": ("forward", 1, 2, 1),
    "third step": ("forward", 3, 3, 1),
    "third step, on the rank that holds the store": ("forward", 3, 3, 0),
    "evaluation": ("forward", 2, 2, 0),
    "checkpoint": ("checkpoint", 1, 2, 1),
}
WAITING = ["distributed.timeout_seconds=3", *LONG_RUN]


def freeze(folder: Path, case: str) -> Ended:
    """A rank is stopped in a stage; its collectives have no time limit, so nothing but the watch ends the others."""
    stage, due, num_ranks, victim = FROZEN[case]
    settings = [*EVALUATING, "training.global_batch_size=2"] if case == "evaluation" else ["checkpoint.every_steps=1"]
    stop = partial(prepare_to_stop, stage, due, victim, holds_store="store" in case)
    command = ForkedLaunch(folder, num_ranks, *WAITING, *settings, preexec=stop)
    process = command.rank(victim)
    command.wait_for(lambda: process.is_running() and process.status() == psutil.STATUS_STOPPED, "the stage")
    others = [other for rank, other in enumerate(command.ranks.processes) if rank != victim]
    command.wait_for(lambda: all(other.exitcode is not None for other in others), "the end of the others")
    process.kill()  # torchrun does it too, after 30 s
    command.finish()
    (exit_code,) = {other.exitcode for other in others}
    assert exit_code is not None
    return Ended(exit_code, command, process.pid)


def prepare_to_stop(stage: str, due: int, victim: int, holds_store: bool) -> None:
    wait_for_ever_in_collectives()
    if holds_store:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        be_a_host()
        Meeting.new_port()
    if os.environ["RANK"] == str(victim):
        at_stage(stage, due, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def wait_for_ever_in_collectives() -> None:
    """gloo's collectives then do as NCCL's, which raise no error in a main thread that waits."""
    start = dist.init_process_group
    dist.init_process_group = lambda *argv, **named: start(*argv, **named | {"timeout": PATIENCE})


def hang(folder: Path) -> Ended:
    """Rank 1's main thread waits for something that never comes, while its other threads live."""
    command = ForkedLaunch(folder, 2, *WAITING, preexec=prepare_to_hang)
    command.finish()
    assert [process.exitcode for process in command.ranks.processes] == [6, 6], command.output
    return Ended(6, command, command.ranks.processes[1].pid or 0)


def prepare_to_hang() -> None:
    wait_for_ever_in_collectives()
    cpu = torch.device("cpu")
    heartbeats._count_collectives = lambda device: (  # as on GPUs
        dist.group.WORLD._get_backend(cpu)._get_sequence_number_for_group()
    )
    if os.environ["RANK"] == "1":
        at_stage("forward", 3, threading.Event().wait)


def suspend(folder: Path) -> Ended:
    """All ranks are suspended for longer than the timeout, continue one after the other, and are then interrupted."""
    command = ForkedLaunch(folder, 2, *WAITING, preexec=wait_for_ever_in_collectives)
    command.wait_for_steps()
    for process in (ranks := [command.rank(rank) for rank in range(2)]):
        process.suspend()
    time.sleep(4)  # not for anything to happen: this is the suspension
    num_steps = (command.run_folder / "metrics.jsonl").read_text().count("\n")
    for process in ranks:
        process.resume()
    command.wait_for_steps(num_steps + 20)
    ranks[0].send_signal(signal.SIGINT)
    return Ended(command.finish(), command)


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

    def end(command: ForkedLaunch) -> Ended:
        """As torchrun does: once a rank has ended, the others get SIGTERM."""
        ranks = command.ranks.processes
        command.wait_for(lambda: any(process.exitcode is not None for process in ranks), "the end of a rank")
        for process in ranks:
            process.terminate()
        return Ended(command.finish(), command)

    real = {
        "SIGTERM": lambda: interrupt(launch("2", *LONG_RUN), signal.SIGTERM),
    }
    forked = {
        "rank 0 killed": lambda: kill(fork("0", *LONG_RUN), 0),
        "SIGINT": lambda: interrupt_rank(fork("1", *LONG_RUN, num_ranks=1), 0, signal.SIGINT),
        "rank 1 killed": lambda: kill(fork("4", *LONG_RUN), 1),
        "rank 1 hangs": lambda: hang(folder / "5"),
        "suspended": lambda: suspend(folder / "10"),
        "SIGUSR1 on rank 1": lambda: interrupt_rank(fork("6", *LONG_RUN), 1, signal.SIGUSR1),
        "SIGTERM in an evaluation": lambda: interrupt_rank(fork("7", *EVALUATING, num_ranks=1), 0, signal.SIGTERM, 3),
        "rank 1 has no model": lambda: end(fork("3", own_model("none"), *data)),
        "rank 1 has half a model": lambda: end(fork("8", own_model("half"), *data)),
        "disk full": lambda: end(fork("9", *short, num_ranks=1, preexec=partial(at_stage, "forward", 1, limit_files))),
    }
    for number, case in enumerate(FROZEN):
        forked[f"frozen: {case}"] = partial(freeze, folder / f"frozen-{number}", case)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(4) as another:  # most of these wait
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


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_rank_is_named_after_the_timeout(ended: dict[str, Future[Ended]], case: str) -> None:
    run, victim = ended[f"frozen: {case}"].result(), FROZEN[case][3]
    assert run.exit_code == RankError.exit_code
    assert run.message.startswith(f"rank {victim} does not answer: process {run.pid} ")
    assert "(it is stopped)" in run.message
    what = "holds the store of the run" if "store" in case else r"gave its last sign of life \d+ s ago, in .*\.py:\d+"
    assert re.search(what, run.message)
    assert run.command.summary["status"] == "failed"


def test_rank_that_hangs_is_named_where_it_stands(ended: dict[str, Future[Ended]]) -> None:
    run = ended["rank 1 hangs"].result()
    assert run.message.startswith(f"rank 1 does not answer: process {run.pid} ")
    assert re.search(r"has stood still for \d+ s, in (.* > )?train > .*\. The other ranks wait for it", run.message)
    assert run.command.summary["status"] == "failed"


def test_suspended_run_goes_on(ended: dict[str, Future[Ended]]) -> None:
    run = ended["suspended"].result()
    assert run.exit_code == 130 and run.message.startswith("Interrupted by SIGINT. Step ")


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
    assert files == {".attempt", ".qlora_fsdp", ".lock"} | records
