"""Ctrl-C in any stage: a line says what is kept, exit code 130, no traceback; a run that has all steps finishes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.config.schema import CheckpointConfig, Config, RunConfig
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenize_source import ROWS_A_PROCESS
from qlora_fsdp.model.causal_lm import CausalLM
from qlora_fsdp.training import run, saver
from qlora_fsdp.training.resume import describe_kept
from tests.cli.launch import ForkedLaunch, Launch

pytestmark = pytest.mark.distributed

SETTINGS = ["model=tiny", "data=random", "data.max_rows=64", "training.max_length=32", "training.max_steps=6"]
SETTINGS += ["lora.r=4", "checkpoint.every_steps=2"]
NOTHING, GOES_ON = "No step is saved: the same command starts again.", "the same command goes on from there."
AT_THE_END = "SIGINT: the run saves and stops at the end of this step, or finishes if that is the last; another Ctrl-C"
# Stage: what is called there (an object, its function, and which call), how many ranks, and what is said.
STAGES: dict[str, tuple[Any, str, int, int, str]] = {
    "settings": (run, "check", 1, 1, NOTHING),
    "data": (run, "prepare", 1, 1, NOTHING),
    "workers that tokenize": (RowTokenizer, "__call__", 1, 1, NOTHING),
    "load": (run, "fill", 1, 2, NOTHING),
    "first step": (CausalLM, "forward", 1, 1, f"Step 1 is saved: {GOES_ON}"),
    "third step": (CausalLM, "forward", 3, 2, f"Step 3 is saved: {GOES_ON}"),
    "third step, twice": (CausalLM, "forward", 3, 2, f"Step 2 is saved: {GOES_ON}"),
    "checkpoint": (saver, "write_checkpoint", 1, 1, f" is saved: {GOES_ON}"),
}
FINISHED: dict[str, tuple[Any, str, int, int, str]] = {
    "export": (run, "save_adapter", 1, 1, "all steps are done, and the run finishes"),
    "report": (run, "write_report", 1, 2, "all steps are done, and the run finishes"),
}


def hold(stage: str, signalled: Path) -> None:
    """Let a rank that comes to the stage wait there until the signals have been sent, and for a minute at most."""
    owner, name, due, _, _ = (STAGES | FINISHED)[stage]
    function, num_calls = getattr(owner, name), 0

    def held(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == due:
            Path(f"held-{os.environ['RANK']}").touch()
            deadline = time.monotonic() + 60
            while not signalled.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return function(*arguments, **named)

    setattr(owner, name, held)


def interrupt(folder: Path, stage: str) -> ForkedLaunch:
    """All ranks and their workers get SIGINT, as from a terminal; of a report the ranks wait for rank 0."""
    num_ranks = (STAGES | FINISHED)[stage][3]
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
    command = ForkedLaunch(folder, num_ranks, *SETTINGS, *more, preexec=partial(hold, stage, signalled))
    holding = [0] if stage == "report" else range(num_ranks)
    command.wait_for(lambda: all((folder / f"held-{rank}").exists() for rank in holding), "the stage")
    if "twice" in stage:  # the second ends the run without waiting for the thread that writes
        command.wait_for((command.run_folder / "checkpoints" / "step-00000002").is_dir, "the checkpoint of step 2")
        send_to_all(command, num_ranks)
        command.wait_for(lambda: AT_THE_END in command.output, "the answer to the first")
    send_to_all(command, num_ranks)
    time.sleep(0.5)
    signalled.touch()
    command.finish()
    return command


def send_to_all(command: ForkedLaunch, num_ranks: int) -> None:
    ranks = [command.rank(rank) for rank in range(num_ranks)]
    for process in (*(child for rank in ranks for child in rank.children(recursive=True)), *ranks):
        process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_kept_is_said(tmp_path: Path, stage: str) -> None:
    command = interrupt(tmp_path, stage)
    assert {process.exitcode for process in command.ranks.processes} == {130}, command.output
    (error,) = command.errors
    assert error.startswith("Interrupted by SIGINT. ") and STAGES[stage][4] in error
    assert "Traceback" not in command.output
    assert (AT_THE_END in command.output) == (STAGES[stage][4] != NOTHING)
    if stage != "settings":  # before there is a folder
        assert command.summary["status"] == "interrupted" and command.summary["error"] == error.strip()


@pytest.mark.parametrize("stage", FINISHED)
def test_a_run_that_has_all_steps_finishes(tmp_path: Path, stage: str) -> None:
    command = interrupt(tmp_path, stage)
    assert {process.exitcode for process in command.ranks.processes} == {0}, command.output
    assert command.summary["status"] == "finished" and not command.errors
    assert FINISHED[stage][4] in command.output and (command.run_folder / "report.html").is_file()


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
    assert command.output == f"\nError: {said}\n"


def test_what_the_same_command_would_not_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    for resume, overwrite, setting in (
        ("auto", False, ""),
        ("auto", True, "without run.overwrite=true "),
        ("none", False, "without checkpoint.resume=none "),
    ):
        config = Config(
            run=RunConfig(folder=str(tmp_path), overwrite=overwrite), checkpoint=CheckpointConfig(resume=resume)
        )
        assert describe_kept(config) == f"Step 7 is saved: {setting}{GOES_ON}"
