"""Where the figures of a run go while it trains: metrics.jsonl, the table of the log, and the trackers.

W&B, TensorBoard and others, which get the journal's figures where they are asked for. Only rank 0 has them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol, cast

from typing_extensions import assert_never

from qlora_fsdp.common.files import write_atomically, write_json
from qlora_fsdp.common.text import first_line, show_duration, show_number
from qlora_fsdp.config.recorded import sections_of
from qlora_fsdp.config.schema import TrackerName, TrackingConfig
from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.config.trackers import HOW_TO_LOG_IN, lacks_wandb_key
from qlora_fsdp.records import run_state
from qlora_fsdp.records.console import COLOR, show_live
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.records.run_folder import log, writing

ROWS_BETWEEN_HEADERS = 30
# Name, least width, format and key of each figure; evaluations and hosts without GPUs lack some.
COLUMNS = (
    ("loss", 8, ".4f", "loss"),
    ("eval loss", 9, ".4f", "eval_loss"),
    ("grad norm", 9, ".4f", "grad_norm"),
    ("lr", 8, ".2e", "learning_rate"),
    ("tokens/s/GPU", 12, ",.0f", "tokens_per_second_per_gpu"),
    ("MFU", 4, ".0%", "mfu"),
    ("GiB", 5, ".1f", "gpu_peak_gib"),
)
OPTIONAL = ("eval_loss", "mfu", "gpu_peak_gib")  # whose columns are left out until there is a first figure
GAP = "  "
MAX_PARAMS = 100  # settings that MLflow takes at a time
MAX_PARAM_LENGTH = 500  # characters that it takes of a value


class ProgressTable:
    """Makes the lines of the table."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.width = max(len("step"), 2 * len(str(num_steps)) + 1)
        self._seen: set[str] = set()
        self._rows_to_header = 0

    def row(self, figures: Mapping[str, Any], eta_seconds: float | None = None, note: str = "") -> str:
        """A line with what `figures`, the keys of a line of metrics.jsonl, say of a step or an evaluation."""
        before = len(self._seen)
        self._seen |= {key for key in OPTIONAL if figures.get(key) is not None}
        if len(self._seen) > before:
            self._rows_to_header = 0
        cells = [f"{figures['step']}/{self.num_steps}".ljust(self.width)]
        for name, width, spec, key in self._columns:
            is_skipped = key == "loss" and figures.get("skipped")
            text = "skipped" if is_skipped else show_number(figures.get(key), spec)
            cells.append(text.rjust(max(width, len(name))))
        return GAP.join([*cells, show_duration(eta_seconds).rjust(8), note]).rstrip()

    def with_header(self, row: str) -> list[str]:
        """The row, below the names of the columns where they were not shown lately or are others now."""
        lines = [row]
        if self._rows_to_header == 0:
            self._rows_to_header = ROWS_BETWEEN_HEADERS
            names = [name.rjust(max(width, len(name))) for name, width, _, _ in self._columns]
            lines.insert(0, GAP.join(["step".ljust(self.width), *names, "ETA".rjust(8)]))
        self._rows_to_header -= 1
        return lines

    @property
    def _columns(self) -> Sequence[tuple[str, int, str, str]]:
        return [column for column in COLUMNS if column[3] in self._seen or column[3] not in OPTIONAL]


SECONDS_BETWEEN_ROWS = 10.0  # of steps, in the log's table; on a terminal the live line shows those between


class Journal:
    """Takes figures on every rank, and writes them on rank 0.

    Args:
        folder: the run folder.
        tracking: the trackers.
        num_steps: steps of the whole run, for the ETA.
        is_main: whether this rank writes.
        first_step: steps done before this start. Lines of later steps are removed, because those are done again.
    """

    def __init__(
        self, folder: Path, tracking: TrackingSpec, num_steps: int, is_main: bool, first_step: int = 0
    ) -> None:
        self.folder = folder
        self.is_main = is_main
        self.num_steps = num_steps
        self.first_step = first_step
        self.first_done = self.last_row = time.monotonic()
        self.records = records_in(folder)
        self.table = ProgressTable(num_steps)
        if is_main:
            with writing(folder):
                _drop_later_lines(folder / run_state.METRICS_FILE, first_step)
                _drop_later_lines(folder / run_state.GENERATIONS_FILE, first_step)
        self.trackers: list[Tracker] = start_trackers(folder, tracking, first_step) if is_main else []

    def step(self, figures: dict[str, Any]) -> None:
        """Record an optimizer step; `figures` has the keys of a line of metrics.jsonl."""
        self._write({"step": figures["step"], "num_steps": self.num_steps, **figures})
        if not self.is_main:
            return
        step = figures["step"]
        now = time.monotonic()
        # The first step is recorded and compiled for those after it, and follows an evaluation.
        if step == self.first_step + 1:
            self.first_done = now
            seconds_a_step = figures["seconds"]
        else:
            seconds_a_step = (now - self.first_done) / (step - self.first_step - 1)
        row = self.table.row(figures, seconds_a_step * (self.num_steps - step))
        if now - self.last_row > SECONDS_BETWEEN_ROWS or step in (self.first_step + 1, self.num_steps):
            self.last_row = now
            show_live("")
            self._log_row(row, "yellow" if figures.get("skipped") else None)
        else:
            show_live(row)

    def evaluation(self, step: int, eval_loss: float, metrics: dict[str, float], seconds: float) -> None:
        """Record an evaluation after `step` optimizer steps; `metrics` are the task's figures other than the loss."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        figures = {"step": step, "eval_loss": eval_loss, **named}
        self._write({**figures, "eval_seconds": round(seconds, 3)})
        if self.is_main:
            notes = [f"{name} {value:.4f}" for name, value in metrics.items()]
            note = ", ".join([*notes, f"{seconds:.1f} s"])
            self._log_row(self.table.row(figures, note=note), "cyan")

    def generations(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record what the model wrote after `step` optimizer steps: each row's prompt, completion and reference."""
        if not self.is_main or not rows:
            return
        rows = [{"step": step, **row} for row in rows]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.records.append(run_state.GENERATIONS_FILE, text)
        self._tell(lambda tracker: tracker.generations(rows, step))

    def checkpoint(self, step: int, folder: Path, stall_seconds: float, write_seconds: float) -> None:
        """Record that the checkpoint of `step` is written: how long training waited for it, and how long it took."""
        figures = {"checkpoint_stall_seconds": round(stall_seconds, 3), "checkpoint_seconds": round(write_seconds, 3)}
        self._write({"step": step, **figures})
        if self.is_main:
            log.info(f"Checkpoint: {folder}, written in {write_seconds:.1f} s; training waited {stall_seconds:.2f} s")

    def used_steps(self) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the steps before this start whose gradient was used. Only rank 0 calls this."""
        lines = [line for line in run_state.read_metrics(self.folder) if "loss" in line and not line.get("skipped")]
        return [(line["loss"], line["grad_norm"]) for line in lines]

    def close(self, summary: dict[str, Any]) -> None:
        """Close what is open. The trackers also get the summary's figures and, of a finished run, the adapter."""
        adapter = self.folder / "adapter" if summary.get("status") == "finished" else None
        self._tell(lambda tracker: tracker.close(summary, adapter))

    def _log_row(self, row: str, color: str | None) -> None:
        *header, row = self.table.with_header(row)
        for line in header:
            log.info(line, extra={COLOR: "bold"})
        log.info(row, extra={COLOR: color})

    def _write(self, figures: dict[str, Any]) -> None:
        if self.is_main:
            self.records.append(run_state.METRICS_FILE, json.dumps(figures) + "\n")
        numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and k != "step"}
        self._tell(lambda tracker: tracker.log(numbers, figures["step"]))

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        """Tell every tracker. One that fails is told nothing more, and the run continues."""
        for tracker in list(self.trackers):
            try:
                what(tracker)
            except Exception as error:
                self.trackers.remove(tracker)
                name = type(tracker).__name__.removesuffix("Tracker")
                log.warning(f"{name} failed and gets no more figures, which are all in {self.folder}: {error!r}")


def _drop_later_lines(file: Path, last_step: int) -> None:
    """Remove the lines of what came after the checkpoint of `last_step`.

    An evaluation after `last_step` belongs to that: it is made after the checkpoint is written, and will be made again.
    """
    if not file.exists():
        return
    kept = []
    for line in file.read_bytes().splitlines(keepends=True):  # of text these are more: U+2028 ends a line too
        with suppress(ValueError):  # a run that was killed may have left half a line
            figures = json.loads(line)
            if figures["step"] < last_step or (figures["step"] == last_step and "loss" in figures):
                kept.append(line)
    write_atomically(file, b"".join(kept).decode())


class Tracker(Protocol):
    """Gets what the journal gets."""

    def log(self, figures: dict[str, float], step: int) -> None:
        """Record figures of a step, by name."""

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        """Record what the model wrote; the rows are lines of generations.jsonl."""

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        """Finish. `adapter` is the folder of the result; None: the run has none."""


def start_trackers(folder: Path, spec: TrackingSpec, first_step: int) -> list[Tracker]:
    """Start the trackers that get the run's figures. A run that resumes at `first_step` is resumed there too."""
    trackers: list[Tracker] = []
    for name in spec.trackers:
        match name:
            case TrackerName.wandb:
                trackers.append(WandbTracker(folder, spec, resumes=first_step > 0))
            case TrackerName.tensorboard:
                trackers.append(TensorBoardTracker(folder, first_step))
            case TrackerName.mlflow:
                trackers.append(MlflowTracker(folder, spec, resumes=first_step > 0))
            case TrackerName.trackio:
                trackers.append(TrackioTracker(spec))
            case other:
                assert_never(other)
    return trackers


def note_missing_key(tracking: TrackingConfig) -> None:
    """Say so if W&B is asked for and gets nothing, because it has no key."""
    if lacks_wandb_key(tracking):
        log.warning(
            f"W&B gets nothing of this run, because it has no key here (tracking.wandb_mode=auto). {HOW_TO_LOG_IN}; or "
            "set tracking.wandb_mode=offline to keep its files in the run folder, for `wandb sync`."
        )


def _read_id(file: Path) -> str | None:
    """The id by which a tracker knows the run; None: there is none, or somebody has written what no tracker makes."""
    found = run_state.read_json(file).get("id")
    if isinstance(found, str) and re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        return found
    if found is not None:
        log.warning(f"{file} has no id of a run: the tracker begins another one.")
    return None


class WandbTracker:
    """A run in W&B. A run that resumes from a checkpoint stays the same run there."""

    def __init__(self, folder: Path, spec: TrackingSpec, resumes: bool) -> None:
        import wandb

        self.log_adapter = spec.log_adapter
        self.last_step = 0
        file = folder / run_state.WANDB_FILE
        run_id = (_read_id(file) if resumes else None) or secrets.token_hex(4)
        with writing(folder):
            write_json(file, {"id": run_id})
        start = partial(
            wandb.init,
            id=run_id,
            resume="allow",
            project=spec.project,
            name=spec.run_name,
            dir=str(folder),
            config=sections_of(spec.recorded),
        )
        self.run: Any
        try:
            self.run = start(mode=cast(Any, spec.wandb.value))
        except wandb.Error as error:  # no network, or a key that W&B refuses: no reason to lose a run
            reason = first_line(error)
            files = folder / "wandb" / "offline-run-*"
            log.warning(f"W&B can't be reached: {reason}. It goes on offline; to send it later: wandb sync {files}")
            wandb.teardown(exit_code=1)  # else its service would say that the run's id is in use
            self.run = start(mode="offline")

    def log(self, figures: dict[str, float], step: int) -> None:
        # W&B refuses figures of a step before the last one. A checkpoint's figures come some steps late, because a
        # thread writes it while training continues.
        self.last_step = max(self.last_step, step)
        self.run.log(figures, step=self.last_step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        import wandb

        columns: list[str | int] = [*rows[0]]
        table = wandb.Table(columns=columns, data=[[row.get(str(name), "") for name in columns] for row in rows])
        self.last_step = max(self.last_step, step)
        self.run.log({"generations": table}, step=self.last_step)

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        import wandb

        if self.log_adapter and adapter is not None:
            artifact = wandb.Artifact(f"adapter-{self.run.id}", type="model")
            artifact.add_dir(str(adapter))
            self.run.log_artifact(artifact)
        self.run.summary.update(summary)
        self.run.finish(exit_code=0 if summary.get("status") == "finished" else 1)


class TensorBoardTracker:
    """Event files in the run folder. `tensorboard --logdir outputs` shows all runs."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # When a run resumes, TensorBoard drops what came after the checkpoint.
        purge = first_step + 1 if first_step else None
        self.writer: Any = SummaryWriter(str(folder / run_state.TENSORBOARD_FOLDER), purge_step=purge)
        log.info(f"TensorBoard: tensorboard --logdir {folder / run_state.TENSORBOARD_FOLDER}")

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        for number, row in enumerate(rows, start=1):
            texts = {name: text for name, text in row.items() if name != "step"}
            parts = (f"**{escape(name)}**\n\n<pre>{escape(str(text))}</pre>" for name, text in texts.items())
            self.writer.add_text(f"generation {number}", "\n\n".join(parts), step)

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        self.writer.close()


class MlflowTracker:
    """A run in MLflow. A run that resumes from a checkpoint stays the same run there."""

    def __init__(self, folder: Path, spec: TrackingSpec, resumes: bool) -> None:
        import mlflow

        self.log_adapter = spec.log_adapter
        self.mlflow = mlflow
        file = folder / run_state.MLFLOW_FILE
        run_id = _read_id(file) if resumes else None
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            mlflow.set_experiment(spec.project)
        run = mlflow.start_run(run_id=run_id, run_name=spec.run_name)
        if run_id is None:  # settings can't be changed there
            with writing(folder):
                write_json(file, {"id": run.info.run_id})
            settings = [(key, str(value)[:MAX_PARAM_LENGTH]) for key, value in spec.recorded.items()]
            for start in range(0, len(settings), MAX_PARAMS):
                mlflow.log_params(dict(settings[start : start + MAX_PARAMS]))

    def log(self, figures: dict[str, float], step: int) -> None:
        named = {name.replace("@", "_at_"): value for name, value in figures.items()}  # pass@1: it takes no such sign
        self.mlflow.log_metrics(named, step=step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        columns = {name: [row.get(name, "") for row in rows] for name in rows[0]}
        self.mlflow.log_table(columns, f"generations/step-{step}.json")

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        if self.log_adapter and adapter is not None:
            self.mlflow.log_artifacts(str(adapter), "adapter")
        self.mlflow.end_run("FINISHED" if summary.get("status") == "finished" else "FAILED")


class TrackioTracker:
    """A run in trackio, under the name of this one."""

    def __init__(self, spec: TrackingSpec) -> None:
        import trackio

        self.run = trackio.init(project=spec.project, name=spec.run_name, config=dict(spec.recorded), resume="allow")

    def log(self, figures: dict[str, float], step: int) -> None:
        self.run.log(figures, step=step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        import pandas  # type: ignore[import-untyped]
        import trackio

        self.run.log({"generations": trackio.Table(dataframe=pandas.DataFrame(rows))}, step=step)

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        self.run.finish()
