"""Figures of a run as it goes: metrics.jsonl, one progress line on the console, and W&B where it is on."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from qlora_fsdp.config.compose import to_yaml
from qlora_fsdp.config.schema import Config, WandbMode
from qlora_fsdp.files import write_atomically, write_json
from qlora_fsdp.run_folder import log, writing
from qlora_fsdp.run_state import read_json, read_metrics

WANDB_FILE = "wandb.json"  # the run's id there
SECONDS_BETWEEN_LINES = 10.0  # of a console that is no terminal, e.g. a batch job's log


class Journal:
    """Takes figures on every rank and writes them on rank 0.

    Args:
        folder: the run folder.
        config: for W&B's settings.
        num_steps: of the whole run, for the ETA.
        is_main: whether this rank writes.
        first_step: steps done before; lines of later ones are dropped.
    """

    def __init__(self, folder: Path, config: Config, num_steps: int, is_main: bool, first_step: int = 0) -> None:
        self.folder, self.is_main, self.num_steps, self.first_step = folder, is_main, num_steps, first_step
        self.started = self.last_line = time.monotonic()
        self.last_step = first_step
        self.is_terminal = sys.stdout.isatty()
        if is_main:
            with writing(folder):
                _drop_later_lines(folder / "metrics.jsonl", first_step)
        self.metrics = (folder / "metrics.jsonl").open("a", buffering=1) if is_main else None
        self.wandb = _start_wandb(folder, config, goes_on=first_step > 0) if is_main else None

    def step(self, figures: dict[str, Any]) -> None:
        """Record an optimizer step; `figures` has the keys of a line of metrics.jsonl."""
        self._write({"step": figures["step"], "num_steps": self.num_steps, **figures})
        if not self.is_main:
            return
        step, now = figures["step"], time.monotonic()
        seconds_a_step = (now - self.started) / (step - self.first_step)
        line = _progress_line(figures, self.num_steps - step, seconds_a_step)
        if self.is_terminal:
            print(f"\r\033[K{line}", end="\n" if step == self.num_steps else "", flush=True)
        elif now - self.last_line > SECONDS_BETWEEN_LINES or step in (self.first_step + 1, self.num_steps):
            log.info(line)
            self.last_line = now

    def evaluation(self, step: int, eval_loss: float, metrics: dict[str, float], seconds: float) -> None:
        """Record an evaluation after `step` optimizer steps; `metrics` are the task's figures besides the loss."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._write({"step": step, "eval_loss": eval_loss, **named, "eval_seconds": round(seconds, 3)})
        if self.is_main:
            print("\r\033[K" if self.is_terminal else "", end="")
            figures = "".join(f" | {name} {value:.4f}" for name, value in metrics.items())
            log.info(f"step {step}/{self.num_steps} | evaluation loss {eval_loss:.4f}{figures} | {seconds:.1f} s")

    def checkpoint(self, step: int, folder: Path, stall_seconds: float, write_seconds: float) -> None:
        """Record that the checkpoint of `step` is there: how long training waited, and how long it was written."""
        figures = {"checkpoint_stall_seconds": round(stall_seconds, 3), "checkpoint_seconds": round(write_seconds, 3)}
        self._write({"step": step, **figures})
        if self.is_main:
            print("\r\033[K" if self.is_terminal else "", end="")
            log.info(f"Checkpoint: {folder}, written in {write_seconds:.1f} s; training waited {stall_seconds:.2f} s")

    def good_norms(self, at_most: int) -> list[float]:
        """Gradient norms of the last steps before this start whose gradient was used; for rank 0."""
        lines = list(read_metrics(self.folder))
        norms = [line["grad_norm"] for line in lines if "grad_norm" in line and not line.get("skipped")]
        return norms[-at_most:]

    def close(self, summary: dict[str, Any]) -> None:
        """Finish: the summary's figures also go to W&B."""
        if self.metrics is not None:
            self.metrics.close()
        if self.wandb is not None:
            self.wandb.summary.update(summary)
            self.wandb.finish(exit_code=0 if summary.get("status") == "finished" else 1)

    def _write(self, figures: dict[str, Any]) -> None:
        if self.metrics is not None:
            with writing(self.folder):
                self.metrics.write(json.dumps(figures) + "\n")
        if self.wandb is not None:
            # A checkpoint's line comes some steps later, and W&B takes none for a step that is past.
            self.last_step = max(self.last_step, figures["step"])
            self.wandb.log({k: v for k, v in figures.items() if v is not None}, step=self.last_step)


def _drop_later_lines(file: Path, last_step: int) -> None:
    """Leave the lines up to the step that a checkpoint was written after; its evaluation came later."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines(keepends=True):
        with suppress(ValueError):  # a kill may have left half a line
            figures = json.loads(line)
            if figures["step"] < last_step or (figures["step"] == last_step and "loss" in figures):
                kept.append(line)
    write_atomically(file, "".join(kept))


def _progress_line(figures: dict[str, Any], num_left: int, seconds_a_step: float) -> str:
    step = figures["step"]
    eta = datetime.timedelta(seconds=round(seconds_a_step * num_left))
    parts = [
        f"step {step}/{step + num_left}",
        "skipped" if figures.get("skipped") else f"loss {figures['loss']:.4f}",
        f"lr {figures['learning_rate']:.2e}",
        f"{figures['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU",
    ]
    if figures["mfu"] is not None:
        parts.append(f"MFU {figures['mfu']:.0%}")
    if figures["gpu_peak_gib"] is not None:
        parts.append(f"{figures['gpu_peak_gib']:.1f} GiB")
    return " | ".join([*parts, f"ETA {eta}"])


def _start_wandb(folder: Path, config: Config, goes_on: bool) -> Any:
    """The run in W&B: the same one again where a checkpoint is gone on from; None: it is off."""
    mode = config.tracking.wandb
    if mode is WandbMode.auto:
        import netrc

        try:
            has_key = "WANDB_API_KEY" in os.environ or netrc.netrc().authenticators("api.wandb.ai") is not None
        except (OSError, netrc.NetrcParseError):
            has_key = False
        mode = WandbMode.online if has_key else WandbMode.disabled
    if mode is WandbMode.disabled:
        return None
    import wandb

    file = folder / WANDB_FILE
    run_id = (read_json(file).get("id") if goes_on else None) or secrets.token_hex(4)
    with writing(folder):
        write_json(file, {"id": run_id})
    return wandb.init(
        id=run_id,
        resume="allow",
        project=config.tracking.project,
        entity=config.tracking.entity,
        name=config.run.name,
        dir=str(folder),
        mode=mode.value,
        config=yaml.safe_load(to_yaml(config)),
    )
