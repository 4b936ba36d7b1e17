"""W&B, TensorBoard and others, which get the journal's figures where they are asked for. Only rank 0 has them."""

from __future__ import annotations

import os
import secrets
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol, cast

from typing_extensions import assert_never

from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.text import first_line
from qlora_fsdp.config.identity import sections_of
from qlora_fsdp.config.schema import TrackerName, TrackingConfig
from qlora_fsdp.config.specs import TrackingSpec
from qlora_fsdp.config.trackers import HOW_TO_LOG_IN, lacks_wandb_key
from qlora_fsdp.records.run_folder import log, writing
from qlora_fsdp.records.run_state import MLFLOW_FILE, TENSORBOARD_FOLDER, WANDB_FILE, read_json

MAX_PARAMS = 100  # settings that MLflow takes at a time
MAX_PARAM_LENGTH = 500  # characters that it takes of a value


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


class WandbTracker:
    """A run in W&B. A run that resumes from a checkpoint stays the same run there."""

    def __init__(self, folder: Path, spec: TrackingSpec, resumes: bool) -> None:
        import wandb

        self.log_adapter = spec.log_adapter
        self.last_step = 0
        file = folder / WANDB_FILE
        run_id = (read_json(file).get("id") if resumes else None) or secrets.token_hex(4)
        with writing(folder):
            write_json(file, {"id": run_id})
        start = partial(
            wandb.init,
            id=run_id,
            resume="allow",
            project=spec.project,
            entity=spec.entity,
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

        columns: list[str | int] = ["step", "prompt", "completion", "reference"]
        table = wandb.Table(columns=columns, data=[[row[str(name)] for name in columns] for row in rows])
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
        self.writer: Any = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purge)
        log.info(f"TensorBoard: tensorboard --logdir {folder / TENSORBOARD_FOLDER}")

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        for number, row in enumerate(rows, start=1):
            parts = (f"**{name}**\n\n<pre>{escape(row[name])}</pre>" for name in ("prompt", "completion", "reference"))
            self.writer.add_text(f"generation {number}", "\n\n".join(parts), step)

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        self.writer.close()


class MlflowTracker:
    """A run in MLflow. A run that resumes from a checkpoint stays the same run there."""

    def __init__(self, folder: Path, spec: TrackingSpec, resumes: bool) -> None:
        import mlflow

        self.log_adapter = spec.log_adapter
        self.mlflow = mlflow
        file = folder / MLFLOW_FILE
        run_id = read_json(file).get("id") if resumes else None
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
        self.mlflow.log_metrics(figures, step=step)

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        """They are in the run folder."""

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
        """They are in the run folder."""

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        self.run.finish()
