"""Ctrl-C in any stage: a line says what is kept, exit code 130, no traceback; a run that has all steps finishes."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from qlora_fsdp import __version__
from qlora_fsdp.config.schema import CheckpointConfig, RunConfig
from qlora_fsdp.data.tokenize_source import ROWS_A_PROCESS
from qlora_fsdp.records import run_folder
from qlora_fsdp.runtime import signals
from qlora_fsdp.training.checkpoints.resume import describe_kept
from tests.cli.launch import SHORT_STEPS, ForkedLaunch, Launch
from tests.cli.stages import at_stage, let_rank_1_tell_first, wait_until_signalled

pytestmark = pytest.mark.distributed

SETTINGS = ["model=tiny", "model.config.num_hidden_layers=1", "data=random", "data.max_rows=64", *SHORT_STEPS]
SETTINGS += ["training.max_length=32", "training.max_steps=6", "lora.r=4", "checkpoint.every_steps=2"]
NOTHING, GOES_ON = "No step is saved: the same command starts again.", "the same command goes on from there."
AT_THE_END = (
    "SIGINT: the run saves and stops at the end of this step, or in an evaluation before its next batch; another"
)
# The stage where the signal comes, at which of its calls, how many ranks, and what is said
CASES: dict[str, tuple[str, int, int, str]] = {
    "settings": ("settings", 1, 1, NOTHING),
    "data": ("data", 1, 1, NOTHING),
    "workers that tokenize": ("workers that tokenize", 1, 1, NOTHING),
    "load": ("load", 1, 2, NOTHING),
    "first step": ("forward", 1, 1, f"Step 1 is saved: {GOES_ON}"),
    "third step": ("forward", 3, 2, f"Step 3 is saved: {GOES_ON}"),
    "third step, and its echo": ("forward", 3, 2, f"Step 3 is saved: {GOES_ON}"),
    "third step, twice": ("forward", 3, 2, f"Step 2 is saved: {GOES_ON}"),
    "checkpoint": ("checkpoint", 1, 1, f" is saved: {GOES_ON}"),
}
FINISHED: dict[str, tuple[str, int, int, str]] = {
    "export": ("export", 1, 1, "all steps are done, and the run finishes"),
    "report": ("report", 1, 2, "all steps are done, and the run finishes"),
}


def interrupt(folder: Path, case: str) -> ForkedLaunch:
    """All ranks and their workers get SIGINT, as from a terminal; of a report the ranks wait for rank 0.

    An echo is what a launcher passes on to ranks that got the signal themselves.
    """
    stage, _, num_ranks, said = (CASES | FINISHED)[case]
    more = []
    if stage == "workers that tokenize":
        (folder / "rows.jsonl").write_text('{"text": "a"}\n' * (ROWS_A_PROCESS + 1))
        more = [
            "data.format=text",
            f"data.path={folder / 'rows.jsonl'}",
            f"data.cache_folder={folder}",
            "data.num_proc=2",
        ]
    signalled = folder / "signalled"
    hold = partial(hold_ranks, case, signalled)
    command = ForkedLaunch(folder, num_ranks, *SETTINGS, *more, preexec=hold)
    holding = [0] if stage == "report" else range(num_ranks)
    command.wait_for(lambda: all((folder / f"held-{rank}").exists() for rank in holding), "the stage")
    if "twice" in case:
        command.wait_for((command.run_folder / "checkpoints" / "step-00000002").is_dir, "the checkpoint of step 2")
    send_to_all(command, num_ranks)
    if said != NOTHING:  # else the signal has ended the stage
        notice = said if case in FINISHED else AT_THE_END
        command.wait_for(lambda: notice in command.output, "the answer to the signal")
        if "echo" in case or "twice" in case:
            send_to_all(command, num_ranks)
        if "twice" not in case:  # the second ends the run without waiting for the thread that writes
            signalled.touch()
    command.finish()
    return command


def hold_ranks(case: str, signalled: Path) -> None:
    signals.ECHO_SECONDS = 1e9 if "echo" in case else 0.0  # however long the test takes
    if case.startswith("third step") and "twice" not in case:
        let_rank_1_tell_first()
    stage, due, _, _ = (CASES | FINISHED)[case]
    at_stage(stage, due, partial(wait_until_signalled, signalled))


def send_to_all(command: ForkedLaunch, num_ranks: int) -> None:
    ranks = [command.rank(rank) for rank in range(num_ranks)]
    for process in (*(child for rank in ranks for child in rank.children(recursive=True)), *ranks):
        process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[ForkedLaunch]]]:
    """The runs, some at the same time: each waits for the test as often as it computes."""
    folder = tmp_path_factory.mktemp("interrupts")
    with ThreadPoolExecutor(2) as pool:
        futures = {}
        for number, case in enumerate(CASES | FINISHED):
            (own := folder / str(number)).mkdir()
            futures[case] = pool.submit(interrupt, own, case)
        yield futures


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_said(ended: dict[str, Future[ForkedLaunch]], case: str) -> None:
    command, said = ended[case].result(), CASES[case][3]
    assert {process.exitcode for process in command.ranks.processes} == {130}, command.output
    (error,) = command.errors
    assert error.startswith("Interrupted by SIGINT. ") and said in error
    assert "Traceback" not in command.output
    assert (AT_THE_END in command.output) == (said != NOTHING)
    if case != "settings":  # before there is a folder
        assert command.summary["status"] == "interrupted" and command.summary["error"] == error.strip()


@pytest.mark.parametrize("case", FINISHED)
def test_a_run_that_has_all_steps_finishes(ended: dict[str, Future[ForkedLaunch]], case: str) -> None:
    command = ended[case].result()
    assert {process.exitcode for process in command.ranks.processes} == {0}, command.output
    assert command.summary["status"] == "finished" and not command.errors
    assert FINISHED[case][3] in command.output and (command.run_folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("launcher", "arguments", "said"),
    [
        ("python", SETTINGS, "Interrupted by SIGINT. No run was going on."),
        ("chat", ["model=tiny"], "Interrupted by SIGINT."),
    ],
)
def test_while_the_libraries_are_imported(tmp_path: Path, launcher: str, arguments: list[str], said: str) -> None:
    """Their tracebacks would be what a user sees."""
    command = Launch(tmp_path, launcher, *arguments)
    maps = Path(f"/proc/{command.process.pid}/maps")
    command.wait_for(lambda: "libtorch_cpu" in maps.read_text(), "the import of torch")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130
    assert command.output == f"qlora-fsdp {__version__}: importing torch ...\n\n{said}\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_job_step(tmp_path: Path, number: signal.Signals) -> None:
    """As `#SBATCH --signal=USR1@120` and `scancel --signal=INT` send it.

    The launcher must outlive the ranks' save, and what the command passes on comes to the ranks for a second time.
    """
    settings = [text for text in SETTINGS if not text.startswith("training.max_steps=")]
    command = Launch(tmp_path, "qlora-fsdp", *settings, "training.max_steps=100000", "launch.num_processes=2")
    command.wait_for_steps()
    started = psutil.Process(command.process.pid)
    launcher, *ranks = started.children(recursive=True)
    for process in (launcher, started, *ranks):
        process.send_signal(number)
    assert command.finish() == 128 + number, command.output
    (error,) = command.errors
    assert error.startswith(f"Interrupted by {number.name}. Step ") and f" is saved: {GOES_ON}" in error
    assert command.summary["status"] == "interrupted"


def test_the_same_command_while_the_run_before_still_saves(tmp_path: Path) -> None:
    """It waits for the folder, and then goes on from what was saved meanwhile. It once began anew, and removed that."""
    settings = [text for text in SETTINGS if not text.startswith(("training.max_steps=", "checkpoint."))]
    signalled, waits = tmp_path / "signalled", tmp_path / "waits"
    hold = partial(at_stage, "checkpoint", 1, partial(wait_until_signalled, signalled))
    first = ForkedLaunch(tmp_path / "first", 1, *settings, "training.max_steps=100000", preexec=hold)
    first.wait_for_steps()
    first.rank(0).send_signal(signal.SIGTERM)
    first.wait_for((tmp_path / "first" / "held-0").exists, "the checkpoint of the signal")
    again = [*settings, "training.max_steps=100000", f"run.folder={first.run_folder}"]
    second = ForkedLaunch(tmp_path / "second", 1, *again, preexec=partial(tell_of_waiting, waits))
    second.wait_for(waits.exists, "the wait for the folder")
    signalled.touch()
    assert first.finish() == 143
    (saved,) = (first.run_folder / "checkpoints").iterdir()
    second.wait_for(lambda: "\nstep " in second.output, "the first step")
    second.rank(0).send_signal(signal.SIGTERM)
    assert second.finish() == 143
    assert f"Going on from step {int(saved.name[-8:])}, {saved}" in second.output and saved.is_dir()


def tell_of_waiting(waits: Path) -> None:
    """Make the file once the run folder is another run's, and have this run wait however long for it."""
    flock, run_folder.LOCK_SECONDS = fcntl.flock, 600.0

    def locking(*args: Any) -> None:
        try:
            flock(*args)
        except BlockingIOError:
            waits.touch()
            raise

    fcntl.flock = locking  # type: ignore[assignment]


def test_what_the_same_command_would_not_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    for resume, overwrite, setting in (
        ("auto", False, ""),
        ("auto", True, "without run.overwrite=true "),
        ("none", False, "without checkpoint.resume=none "),
    ):
        run, settings = RunConfig(folder=str(tmp_path), overwrite=overwrite), CheckpointConfig(resume=resume)
        assert describe_kept(run, settings) == f"Step 7 is saved: {setting}{GOES_ON}"
