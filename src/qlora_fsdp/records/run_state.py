"""The state of a run as its folder shows it, at any time and to any process. Imports no torch.

A run holds a lock on `.lock` as long as it lives. So a run that was killed can be told from one that still trains.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_fsdp.common.errors import LaunchError, RunFolderError
from qlora_fsdp.common.foreign_files import open_regular, read_small

LOCK = ".lock"
ATTEMPT = ".attempt"  # which start of which launch began to train here last
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"  # the folder with a folder for each
LOG_FILE = "train.log"
CONSOLE_FILE = "console.log"  # what the processes of a job printed
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
GENERATIONS_FILE = "generations.jsonl"
REPORT_ROWS_FILE = "report_rows.safetensors"  # rows on which `merge` compares its result with what was trained
STREAM_FILE = "stream.jsonl"  # where the windows of streamed data begin
WINDOWS_FOLDER = "windows"  # the tokenized rows of the last of them
BAD_STEPS_FOLDER = "bad_steps"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb.json"  # the id that the tracker knows the run by
MLFLOW_FILE = "mlflow.json"  # the same
START_FOLDER = "start_adapter"  # a copy of the adapter that the run started from
# A new run in the folder removes these, which would otherwise have the records of two runs.
RECORDS = (
    METRICS_FILE,
    LOG_FILE,
    REPORT_FILE,
    GENERATIONS_FILE,
    REPORT_ROWS_FILE,
    BAD_STEPS_FOLDER,
    TENSORBOARD_FOLDER,
    START_FOLDER,
    WINDOWS_FOLDER,
)
MANIFEST = "manifest.json"  # of a checkpoint
SWEEP_FILE = "sweep.json"
NAME_MAX = 255  # bytes of a file's name on Linux (limits.h)
SLURM_FILE = "slurm.json"  # the number of the job that was submitted
FRESH_SECONDS = 120.0  # where the file system has no locks, a run that wrote so lately counts as running
NUM_FINAL = 10  # the final loss is the mean over this many last steps, because that of one step depends on its rows
NUM_STEPS_TIMED = 50  # the ETA follows from the times of this many last steps
MAX_METRICS_BYTES = 2**30  # of metrics.jsonl: millions of steps
MAX_DIGITS = 100
TAIL_BYTES = 2**20  # as much of metrics.jsonl is read where only its end is wanted


@dataclass(frozen=True)
class RunState:
    """A run as its folder shows it.

    Attributes:
        folder: the run folder.
        status: `finished`, `failed`, `interrupted`, `running`, `stopped` (it left no summary and no adapter) or `new`.
        step: optimizer steps done.
        num_steps: optimizer steps of the whole run.
        loss: final training loss: the mean of the last steps (`num_averaged`) whose gradient was used. Never that of an
            evaluation.
        eval_loss: the loss of the last evaluation.
        metric_name: another figure of the evaluations that the finished run is judged by; None: its loss.
        metric: that figure of the last evaluation, or of the step whose adapter is the result.
        greater_is_better: whether the greatest is the best.
        tokens_per_second_per_gpu: median of the last steps.
        gpu_peak_gib: most memory in any step.
        eta_seconds: until the last step, while it runs.
        checkpoint: the newest one that is complete.
        checkpoint_age_seconds: how long ago it was written.
        error: why the run failed or was interrupted.
        stopped_early: why it finished before its last step.
    """

    folder: Path
    status: str
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    metric_name: str | None = None
    metric: float | None = None
    greater_is_better: bool = False
    tokens_per_second_per_gpu: float | None = None
    gpu_peak_gib: float | None = None
    eta_seconds: float | None = None
    checkpoint: Path | None = None
    checkpoint_age_seconds: float | None = None
    error: str | None = None
    stopped_early: str | None = None

    @property
    def adapter(self) -> Path | None:
        """The result, if it is there."""
        folder = self.folder / "adapter"
        return folder if self.status == "finished" and folder.is_dir() else None

    @property
    def report(self) -> Path | None:
        """The page about the run, if it is there."""
        file = self.folder / REPORT_FILE
        return file if file.is_file() else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one for each step and each evaluation so far (docs/watching.md)."""
        return list(read_metrics(self.folder))

    @property
    def compared(self) -> float | None:
        """The figure by which runs of the same data are ranked: of the last evaluation, or else training's loss."""
        if self.metric_name is not None:
            return self.metric
        return self.loss if self.eval_loss is None else self.eval_loss

    @property
    def compared_by(self) -> str:
        """The name of `compared`."""
        if self.metric_name is not None:
            return f"evaluation {self.metric_name}"
        return "loss" if self.eval_loss is None else "evaluation loss"


def _is_run_folder(folder: Path) -> bool:
    """Whether a run has been started in this folder."""
    return (folder / CONFIG_FILE).is_file() and (folder / ENVIRONMENT_FILE).is_file()


def find_runs(folder: Path) -> list[Path]:
    """The run folders in `folder` and below, sorted. A run folder may have others inside, as that of a sweep does.

    Raises:
        RunFolderError: the folder is not there.
    """
    if not folder.exists():
        raise RunFolderError(f"{folder} is not there. Name a run.folder, or a folder above some.")
    found = []
    for path, folders, _ in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("adapter", CHECKPOINTS)]
        if _is_run_folder(Path(path)):
            found.append(Path(path))
    return sorted(found)


def checkpoint_folders(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. Folders with other names are left out."""
    return sorted(path for path in folder.glob("step-*") if step_of(path) is not None and path.is_dir())


def step_of(checkpoint: Path) -> int | None:
    """Optimizer steps done in a checkpoint, by the name of its folder; None where that is not a checkpoint's."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else None


def read_run(folder: Path) -> RunState:
    """Read the state of the run in `folder`. A folder that does not exist is a `new` run."""
    summary = read_json(folder / SUMMARY_FILE)
    lines = list(read_metrics(folder, last=True))
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    last = steps[-1] if steps else {}
    last_evaluation = evaluations[-1] if evaluations else {}
    timed = steps[-NUM_STEPS_TIMED:]
    status = _text(summary, "status") or _status(folder)
    checkpoints = checkpoint_folders(folder / CHECKPOINTS)
    checkpoint = checkpoints[-1] if checkpoints else None
    speed = _number(summary, "tokens_per_second_per_gpu")
    return RunState(
        folder,
        status,
        step=_first(_number(summary, "steps"), _number(last, "step")),
        num_steps=_number(last, "num_steps"),
        loss=_first(_number(summary, "final_loss"), _mean_loss(steps)),
        eval_loss=_first(_number(summary, "eval_loss"), _number(last_evaluation, "eval_loss")),
        tokens_per_second_per_gpu=_first(speed, _median(timed, "tokens_per_second_per_gpu")),
        gpu_peak_gib=_first(_number(summary, "step_gpu_peak_gib"), _number(last, "gpu_peak_gib")),
        eta_seconds=_eta(last, _median(timed, "seconds")) if status == "running" else None,
        checkpoint=checkpoint,
        checkpoint_age_seconds=None if checkpoint is None else _age(checkpoint),
        error=_text(summary, "error"),
        metric_name=_text(summary, "metric_for_best_model"),
        metric=_number(summary, "metric"),
        greater_is_better=summary.get("greater_is_better") is True,
        stopped_early=_text(summary, "stopped_early"),
    )


def _mean_loss(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean loss of the last steps whose gradient was used."""
    losses = [_number(line, "loss") for line in steps if not line.get("skipped")]
    losses = [loss for loss in losses if loss is not None]
    return statistics.fmean(losses[-num_averaged(len(losses)) :]) if losses else None


def num_averaged(num_steps: int) -> int:
    """Steps whose mean is a run's initial or final loss: its first or last ten, or half of a shorter run's."""
    return max(1, min(NUM_FINAL, num_steps // 2))


def _eta(last: Mapping[str, Any], seconds_a_step: float | None) -> float | None:
    """Seconds until the last step, from the line of the newest one."""
    num_steps = _number(last, "num_steps")
    if not num_steps or seconds_a_step is None or not math.isfinite(seconds_a_step):
        return None
    step = _number(last, "step") or 0
    return float(seconds_a_step * (num_steps - step))


def _age(checkpoint: Path) -> float | None:
    """Seconds since a checkpoint was written; None where the run is just removing it."""
    try:
        written = (checkpoint / MANIFEST).stat().st_mtime
    except OSError:
        return None
    return max(0.0, time.time() - written)


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder has done all that it does, its summary last."""
    return _text(read_json(folder / SUMMARY_FILE), "status") == "finished"


def slurm_queue(seconds: float = 60) -> dict[str, str]:
    """The state of this user's SLURM jobs by job number, such as `pending (Priority)`; empty without SLURM.

    Args:
        seconds: how long SLURM gets to answer.

    Raises:
        LaunchError: SLURM does not answer, so that nobody knows whether there are jobs.
    """
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout
    except OSError:
        return {}
    except subprocess.SubprocessError as error:
        reason = f"nothing came within {seconds:.0f} seconds"
        if isinstance(error, subprocess.CalledProcessError):
            reason = " ".join(error.stderr.split())
        raise LaunchError(f"squeue does not answer: {reason}. Start the command again when it does.") from error
    queue = {}
    for line in answer.splitlines():
        number, state, reason = line.split("|", 2)
        queue[number] = state.lower() + (f" ({reason})" if state == "PENDING" else "")
    return queue


def read_job_id(folder: Path) -> str:
    """The number of the SLURM job that a run was submitted as; empty if it was not."""
    return str(read_json(folder / SLURM_FILE).get("job_id", ""))


def describe_attempt(environ: Mapping[str, str]) -> dict[str, Any]:
    """The launch that this process belongs to, and how often SLURM and torchrun have started it again."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    launch = environ.get("SLURM_JOB_ID") or f"{platform.node()} {os.getppid()}"
    return {"launch": launch, "restarts": [int(environ.get(name, "0")) for name in names]}


def read_metrics(folder: Path, last: bool = False, file: str = METRICS_FILE) -> Iterator[dict[str, Any]]:
    """The complete lines about steps in metrics.jsonl, or in another `file`; with `last` only those at its end."""
    try:
        with open_regular(folder, file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES) if last else 0)
            content = stream.read(MAX_METRICS_BYTES)
    except (OSError, ValueError):
        return
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):  # the first and the last line may be cut off
            values = json.loads(line, parse_int=_whole_number)
            if isinstance(values, dict) and "step" in values:
                yield values


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder, which somebody else may have made; empty where there is none."""
    try:
        value = json.loads(read_small(file.parent, file.name), parse_int=_whole_number)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _whole_number(digits: str) -> int | float:
    """A whole number of JSON; infinity where it has more digits than any figure of a run, and than a float takes."""
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


def read_jobs(file: Path) -> list[tuple[Path, dict[str, str]]]:
    """The jobs of a sweep.json: each one's folder and swept settings. What is no job is left out.

    They are beside the file, also where the sweep was moved, or copied from another machine.
    """
    jobs = read_json(file).get("jobs")
    if not isinstance(jobs, list):
        return []
    here = file.parent.resolve()
    found: list[tuple[Path, dict[str, str]]] = []
    for job in jobs:
        folder = job.get("folder") if isinstance(job, dict) else None
        if not isinstance(folder, str) or not _can_be_a_name(Path(folder).name):
            continue
        overrides = job.get("overrides")
        if isinstance(overrides, dict):
            found.append((here / Path(folder).name, {str(key): str(value) for key, value in overrides.items()}))
    return found


def _can_be_a_name(name: str) -> bool:
    """Whether a file or folder can have the name at all: no file system asks for more than NAME_MAX bytes."""
    try:
        return "\0" not in name and len(os.fsencode(name)) <= NAME_MAX
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _text(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return value if isinstance(value, str) else None


def _number(values: Mapping[str, Any], key: str) -> Any:
    """A number of the records, NaN and infinite ones too; None where there is none that can be shown."""
    value = values.get(key)
    return value if type(value) is float or (type(value) is int and abs(value) < 2**63) else None


def _first(one: Any, other: Any) -> Any:
    return other if one is None else one


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for value in (_number(line, key) for line in lines) if value is not None]
    return statistics.median(values) if values else None


def _status(folder: Path) -> str:
    """The status of a run without a summary."""
    if not _is_run_folder(folder):
        return "new"
    if _is_locked(folder / LOCK):
        return "running"
    files = [folder / name for name in (METRICS_FILE, LOG_FILE, ENVIRONMENT_FILE)]
    newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    is_fresh = time.time() - newest < FRESH_SECONDS
    if is_fresh and not (folder / LOCK).exists():
        return "running"
    with suppress(OSError):  # each start writes an environment, and the end an adapter: summary.json may have no room
        if (folder / "adapter").stat().st_mtime >= (folder / ENVIRONMENT_FILE).stat().st_mtime:
            return "finished"
    return "stopped"


def _is_locked(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
