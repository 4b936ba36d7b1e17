"""`qlora-fsdp status FOLDER...`: the state of every run and job in these folders. Imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qlora_fsdp.common.errors import LaunchError, UserError, print_error
from qlora_fsdp.common.startup import end_with_the_reader
from qlora_fsdp.common.text import format_table, printable_lines, show_duration, show_number
from qlora_fsdp.records.run_state import (
    SLURM_FILE,
    SWEEP_FILE,
    RunState,
    find_runs,
    read_job_id,
    read_jobs,
    read_run,
    slurm_queue,
    step_of,
)

SLURM_SECONDS = 5.0  # somebody waits for the table, and SLURM has only one column of it


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table of the runs in the folders of the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="qlora-fsdp status", description="Show every run in a folder.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or what holds several")
    folders = [folder.resolve() for folder in parser.parse_args(argv).folders]
    try:
        print(printable_lines(show_status(folders)))
    except UserError as error:
        print_error(error)
        return error.exit_code
    return 0


def show_status(folders: Sequence[Path]) -> str:
    """Returns the table of the runs in and below `folders`, then why those that ended early did so.

    Raises:
        LaunchError: there is no run.
        RunFolderError: a folder is not there.
    """
    found = list(dict.fromkeys(run for folder in folders for run in [*find_runs(folder), *_planned(folder)]))
    if not found:
        raise LaunchError(f"No run is in {', '.join(map(str, folders))}. Name a run.folder, or a folder above some.")
    root = Path(os.path.commonpath(folders))
    queue = dict[str, str]()
    rows = []
    reasons = []
    job_ids = {run: read_job_id(run) for run in found}
    try:
        queue = slurm_queue(seconds=SLURM_SECONDS) if any(job_ids.values()) else {}
    except LaunchError as error:  # the folders can be read whether SLURM answers or not
        reasons.append(f"Which jobs wait in SLURM's queue is not known. {error}")
    for run in found:
        state = read_run(run)
        job_id = job_ids[run]
        name = _name(run, root)
        status = _in_queue(queue.get(job_id, ""), state.status)
        rows.append(_row(name, state, status or _told(state), job_id))
        reason = None if status else state.error or _reason(state)
        reasons += [f"{name}: {reason.partition(chr(10))[0]}"] if reason else []
    return "\n".join([format_table(rows), *([""] if reasons else []), *reasons])


def _told(state: RunState) -> str:
    return "setting up" if state.status == "running" and state.step is None else state.status


def _reason(state: RunState) -> str | None:
    """Why a run that left no word of it has ended, and what its command would do now."""
    if state.status != "stopped":
        return None
    saved = None if state.checkpoint is None else step_of(state.checkpoint)
    now = "No step is saved: the same command starts again."
    if saved is not None:
        now = f"The same command goes on from step {saved}."
    return f"ended without a word: killed, perhaps for want of host memory (see dmesg). {now}"


def _in_queue(queued: str, status: str) -> str:
    """SLURM's plan for a run; empty if the run itself knows better."""
    if not queued or status == "running":
        return ""
    return "starting" if queued.startswith("running") else f"queued: {queued}"


def _row(name: str, state: RunState, status: str, job_id: str) -> dict[str, str]:
    saved = ""
    if state.checkpoint is not None:
        age = state.checkpoint_age_seconds
        ago = "" if age is None else f", {show_duration(age)} ago"
        saved = f"step {step_of(state.checkpoint)}{ago}"
    steps = "" if state.step is None else str(state.step)
    if steps and state.num_steps:
        steps += f"/{state.num_steps}"
    return {
        "run": name,
        "state": status,
        "step": steps,
        "train loss": show_number(state.loss, ".4f"),
        "eval loss": show_number(state.eval_loss, ".4f"),
        "tokens/s/GPU": show_number(state.tokens_per_second_per_gpu, ",.0f"),
        "ETA": show_duration(state.eta_seconds),
        "checkpoint": saved,
        "SLURM job": job_id,
    }


def _planned(folder: Path) -> list[Path]:
    """The folders of jobs of a sweep and of jobs that SLURM has, whether these have started or not."""
    jobs = [job for file in sorted(folder.rglob(SWEEP_FILE)) for job, _ in read_jobs(file)]
    return [*jobs, *(file.parent for file in sorted(folder.rglob(SLURM_FILE)))]


def _name(run: Path, root: Path) -> str:
    if run == root:
        return run.name
    if run.is_relative_to(root):
        return str(run.relative_to(root))
    return str(run)


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
