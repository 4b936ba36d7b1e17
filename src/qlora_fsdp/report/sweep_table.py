"""The results of a sweep: sweep.json, sweep.csv, and a table for the terminal. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_fsdp.common.files import write_atomically, write_json
from qlora_fsdp.common.text import format_table, show_number
from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.records.run_state import SWEEP_FILE, read_jobs, read_run

BEST = "best"  # the link to the best job's folder
LEAST_WANTED = ("adapter", "peak_gib", "tokens/s/GPU", "final_loss")  # columns that a narrow terminal does without


def describe_job(folder: Path, swept: dict[str, str]) -> dict[str, Any]:
    """Returns the entry of sweep.json about a job: its swept settings, and the present state of its run."""
    state = read_run(folder)
    metric: dict[str, Any] = {}
    if state.metric_name is not None:
        metric = {name: getattr(state, name) for name in ("metric_name", "metric", "greater_is_better")}
    return {
        "overrides": swept,
        "status": state.status,
        "stopped_early": state.stopped_early,
        "loss": state.loss if state.eval_loss is None else state.eval_loss,
        **metric,
        "eval_loss": state.eval_loss,
        "final_loss": state.loss,
        "steps": state.step,
        "tokens_per_second_per_gpu": state.tokens_per_second_per_gpu,
        "gpu_peak_gib": state.gpu_peak_gib,
        "folder": str(folder),
        "adapter": str(state.adapter) if state.adapter else None,
        "error": state.error,
    }


def write_results(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Writes sweep.json and sweep.csv to the folder of the sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SWEEP_FILE, {"jobs": jobs})
    rows = [job["overrides"] | {key: value for key, value in job.items() if key != "overrides"} for job in jobs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _defuse(value) for name, value in row.items()} for row in rows)
    write_atomically(folder / "sweep.csv", text.getvalue())


def _defuse(value: Any) -> Any:
    """A text as a spreadsheet shows it: one that begins like a formula would be computed, and may run a command.

    Such a text gets an apostrophe in front, as OWASP recommends. Numbers stay as they are.
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)
        return value
    except ValueError:
        return "'" + value.replace("\r", " ")  # Python's csv leaves a lone one as it is


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns the present state of the jobs of the sweep in `folder`; empty if there is no sweep."""
    return [describe_job(job, swept) for job, swept in read_jobs(folder / SWEEP_FILE)]


def best_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the finished jobs with the lowest loss, or the best figure of another name; nearly always one."""
    costs = [_cost(job) for job in jobs]
    lowest = min(costs, default=math.inf)
    return [job for job, cost in zip(jobs, costs, strict=True) if cost == lowest < math.inf]


def _cost(job: Mapping[str, Any]) -> float:
    """The figure that a finished job is judged by, as a number of which the lowest is the best; else infinite."""
    value = job.get("metric", job["loss"])
    if job["status"] != "finished" or value is None:
        return math.inf
    return Criterion(greater_is_better=job.get("greater_is_better", False)).cost(value)


def link_best(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> Path | None:
    """Makes `best` in the folder of a sweep a link to the best finished job's folder.

    Returns:
        The link; None if there is no such job, or `best` is somebody's own file or folder.

    Raises:
        OSError: the folder can't be written.
    """
    best = best_jobs(jobs)
    link = folder / BEST
    if not best or (link.exists() and not link.is_symlink()):
        return None
    temporary = folder / f".{BEST}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path(best[0]["folder"]).name, target_is_directory=True)
    temporary.replace(link)
    return link


def show_results(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of a sweep, in which the best job has a star."""
    best = best_jobs(jobs)
    rows = []
    for job in jobs:
        is_best = job in best
        adapter = Path(job["adapter"]) if job["adapter"] else None
        rows.append(
            {" ": "*" if is_best else ""}
            | job["overrides"]
            | {
                "status": "stopped early" if job["stopped_early"] else job["status"],
                **({f"eval_{job['metric_name']}": show_number(job["metric"], ".4f")} if "metric" in job else {}),
                "eval_loss": show_number(job["eval_loss"], ".4f"),
                "final_loss": show_number(job["final_loss"], ".4f"),
                "tokens/s/GPU": show_number(job["tokens_per_second_per_gpu"], ",.0f"),
                "peak_gib": show_number(job["gpu_peak_gib"], ".1f"),
                "adapter": str(adapter.relative_to(folder) if adapter and adapter.is_relative_to(folder) else ""),
            }
        )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    for name in LEAST_WANTED:  # sweep.csv has all
        if max(map(len, format_table(rows).splitlines()), default=0) > width:
            for row in rows:
                row[name] = ""
    return format_table(rows)
