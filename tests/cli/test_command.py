"""`qlora-fsdp train` on two ranks: however it ends, the message is the last thing on the screen."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from qlora_fsdp.runtime.signals import ECHO_SECONDS
from tests.cli.launch import SHORT_STEPS, Launch, check_message_alone

pytestmark = pytest.mark.distributed

TINY = [
    "model=tiny",
    "model.config.num_hidden_layers=1",
    "data=random",
    "training.max_length=32",
    "lora.r=4",
    *SHORT_STEPS,
]
LONG_RUN = [*TINY, "training.max_steps=100000", "launch.num_processes=2"]
OFFLOADING = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_offload_params: true, fsdp_version: 2}
num_machines: 1
num_processes: 2
"""


def contradict(folder: Path) -> Launch:
    """Only the ranks see what accelerate's file says."""
    (folder / "accelerate.yaml").write_text(OFFLOADING)
    return Launch(folder, "qlora-fsdp", *TINY, "training.max_steps=1", "launch.config_file=accelerate.yaml")


def start(folder: Path) -> Launch:
    command = Launch(folder, "qlora-fsdp", *LONG_RUN)
    command.wait_for_steps()
    return command


def kill_one(folder: Path) -> Launch:
    command = start(folder)
    command.rank(1).kill()
    return command


def kill_all(folder: Path) -> Launch:
    command = start(folder)
    ranks = [command.rank(0), command.rank(1)]
    for rank in ranks:  # none is able to tell of the other
        rank.suspend()
    for rank in ranks:
        rank.kill()
    return command


def interrupt(folder: Path) -> Launch:
    command = start(folder)
    command.process.send_signal(signal.SIGINT)
    return command


def interrupt_twice(folder: Path) -> Launch:
    """Rank 1 stands still, so that the step does not end in between."""
    command = start(folder)
    rank = command.rank(1)
    rank.suspend()
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "SIGINT: the run saves and stops" in command.output, "the answer to the first")
    time.sleep(ECHO_SECONDS)  # what comes sooner is taken for the same signal
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: "Interrupted by" in command.output, "the answer to the second")
    rank.resume()
    return command


def interrupt_imports(folder: Path) -> Launch:
    command = Launch(folder, "qlora-fsdp", *LONG_RUN)
    command.wait_for(lambda: "importing torch" in command.output, "the first line")
    command.process.send_signal(signal.SIGINT)
    return command


# What happens, the exit code, and the message; SIGTERM is in test_train_on.py, to a run that has been resumed
CASES: dict[str, tuple[Callable[[Path], Launch], int, str]] = {
    "contradiction": (contradict, 2, "Error: FSDP_OFFLOAD_PARAMS=true contradicts fsdp.cpu_offload=false, which is"),
    "a rank is killed": (kill_one, 6, "Error: rank 1 is gone: process "),
    "Ctrl-C": (interrupt, 130, "Interrupted by SIGINT. Step "),
    "Ctrl-C during the imports": (interrupt_imports, 130, "Interrupted by SIGINT. No run was going on."),
}
SLOW_CASES: dict[str, tuple[Callable[[Path], Launch], int, str]] = {
    "all ranks are killed": (kill_all, 6, "Error: rank "),  # whichever the launcher sees first
    "Ctrl-C twice": (interrupt_twice, 130, "Interrupted by SIGINT. No step is saved"),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Launch]]]:
    """The commands that this session's tests ask for, two at a time: each waits more than it computes."""
    folder = tmp_path_factory.mktemp("commands")
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("case") for item in own}

    def run(case: str, act: Callable[[Path], Launch]) -> Launch:
        (own := folder / case).mkdir()
        command = act(own)
        command.finish()
        return command

    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(run, case, act) for case, (act, *_) in (CASES | SLOW_CASES).items() if case in asked}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_ends_with_the_message_alone(ended: dict[str, Future[Launch]], case: str) -> None:
    command, (_, exit_code, message) = ended[case].result(), (CASES | SLOW_CASES)[case]
    assert command.finish() == exit_code, command.output
    check_message_alone(command, message)


@pytest.mark.slow
def test_the_ranks_save_and_stop_when_the_command_is_killed(tmp_path: Path) -> None:
    command = start(tmp_path)
    ranks = [command.rank(0), command.rank(1)]
    command.process.kill()
    command.finish()
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert not alive
    assert command.summary["status"] == "interrupted"


@pytest.mark.slow
def test_a_job_of_a_sweep_is_passed_signals_too(tmp_path: Path) -> None:
    """Through the same launcher: its console.log ends with the message."""
    command = Launch(tmp_path, "qlora-fsdp", "-m", *LONG_RUN, "training.seed=1,2")
    console = tmp_path / "run" / "training.seed=1" / "console.log"
    metrics = console.parent / "metrics.jsonl"
    command.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, "steps")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130
    assert console.read_text().rpartition("\n\n")[2].startswith("Interrupted by SIGINT. Step ")
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
