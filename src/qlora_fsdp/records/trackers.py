"""W&B and TensorBoard, which get the journal's figures where they are asked for. Only rank 0 has them."""

from __future__ import annotations

import secrets
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Protocol, cast

from qlora_fsdp.common.files import write_json
from qlora_fsdp.config.check_settings import wandb_mode
from qlora_fsdp.config.identity import plain_settings, sections_of
from qlora_fsdp.config.schema import Config, WandbMode
from qlora_fsdp.records.run_folder import log, writing
from qlora_fsdp.records.run_state import TENSORBOARD_FOLDER, read_json

WANDB_FILE = "wandb.json"  # has the id that W&B knows the run by


class Tracker(Protocol):
    """Gets what the journal gets."""

    def log(self, figures: dict[str, float], step: int) -> None:
        """Record figures of a step, by name."""

    def generations(self, rows: list[dict[str, Any]], step: int) -> None:
        """Record what the model wrote; the rows are lines of generations.jsonl."""

    def close(self, summary: dict[str, Any], adapter: Path | None) -> None:
        """Finish. `adapter` is the folder of the result; None: the run has none."""


def start_trackers(folder: Path, config: Config, first_step: int) -> list[Tracker]:
    """Start what `tracking` asks for. A run that resumes at `first_step` is resumed there too."""
    trackers: list[Tracker] = []
    mode = wandb_mode(config)
    if mode is not WandbMode.disabled:
        trackers.append(WandbTracker(folder, config, mode, resumes=first_step > 0))
    if config.tracking.tensorboard:
        trackers.append(TensorBoardTracker(folder, first_step))
    return trackers


class WandbTracker:
    """A run in W&B. A run that resumes from a checkpoint stays the same run there."""

    def __init__(self, folder: Path, config: Config, mode: WandbMode, resumes: bool) -> None:
        import wandb

        self.tracking, self.last_step = config.tracking, 0
        file = folder / WANDB_FILE
        run_id = (read_json(file).get("id") if resumes else None) or secrets.token_hex(4)
        with writing(folder):
            write_json(file, {"id": run_id})
        start = partial(
            wandb.init,
            id=run_id,
            resume="allow",
            project=config.tracking.project,
            entity=config.tracking.entity,
            name=config.run.name,
            dir=str(folder),
            config=sections_of(plain_settings(config)),
        )
        self.run: Any
        try:
            self.run = start(mode=cast(Any, mode.value))
        except wandb.Error as error:  # no network, or a key that W&B refuses: no reason to lose a run
            reason, files = str(error).partition("\n")[0], folder / "wandb" / "offline-run-*"
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

        if self.tracking.log_adapter and adapter is not None:
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
