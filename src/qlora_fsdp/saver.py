"""When checkpoints are written, and what a signal does: all ranks agree at the end of a step, save, and stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn, optim

from qlora_fsdp.checkpoint import (
    Checkpoint,
    checkpoint_folders,
    load_checkpoint,
    read_manifest,
    remove_checkpoints,
    save_checkpoint,
)
from qlora_fsdp.config.schema import CheckpointConfig
from qlora_fsdp.distributed import Processes
from qlora_fsdp.errors import Interrupted
from qlora_fsdp.run_folder import log
from qlora_fsdp.watch import Watch


class Saver:
    """Writes the checkpoints of a run.

    Args:
        config: when, and how many to keep.
        content: what every checkpoint of this run says, but for the step; its folder is run.folder/checkpoints, and its
            `eval_losses` grow as the loop evaluates.
        model: sharded.
        optimizer: over its trainable parameters.
        write_adapter: writes the adapter to a folder; every rank calls it.
        processes: all ranks take part.
        watch: has the signals.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        content: Checkpoint,
        model: nn.Module,
        optimizer: optim.Optimizer,
        write_adapter: Callable[[Path], None],
        processes: Processes,
        watch: Watch,
    ) -> None:
        self.config, self.content, self.model, self.optimizer = config, content, model, optimizer
        self.write_adapter, self.processes, self.watch = write_adapter, processes, watch
        self.last_time = time.monotonic()

    def asks(self) -> bool:
        """Whether this rank wants a checkpoint after the step it is in: it got a signal, or the time has come."""
        minutes = self.config.every_minutes
        is_time = minutes is not None and time.monotonic() - self.last_time >= 60 * minutes
        return self.watch.asked is not None or (is_time and self.processes.is_main)  # one clock counts

    def is_due(self, step: int, asked: bool) -> bool:
        """Whether `after_step` has something to do; arguments as there."""
        every = self.config.every_steps
        return asked or (every is not None and step % every == 0)

    def after_step(self, step: int, asked: bool) -> None:
        """Save, because it `is_due`.

        Args:
            step: optimizer steps done.
            asked: whether `asks` was true on any rank.

        Raises:
            Interrupted: a rank got a signal; the checkpoint has been written, if that was possible.
        """
        error = self._save(step)
        if asked:
            self._stop_on_signal(step, error)

    def save(self, step: int) -> bool:
        """Save now, after so many steps; whether a checkpoint of this step is there."""
        folder = _step_folder(self.content.folder, step)
        is_there = self.processes.share(folder.is_dir() if self.processes.is_main else None)
        return step > 0 and (is_there or self._save(step) is None)

    def restore(self) -> int | None:
        """Load the newest checkpoint of this run into model and optimizer; its step, or None if there is none."""
        folders = checkpoint_folders(self.content.folder) if self.processes.is_main else []
        newest = self.processes.share(read_manifest(folders[-1]) if folders else None)
        if newest is None:
            return None
        load_checkpoint(newest, self.model, self.optimizer, self.processes)
        return int(newest.step)

    def _save(self, step: int) -> str | None:
        """Write a checkpoint; what went wrong, on whichever rank."""
        started = time.monotonic()
        folder = _step_folder(self.content.folder, step)
        content = replace(self.content, folder=folder, step=step)
        error = save_checkpoint(content, self.model, self.optimizer, self.write_adapter, self.processes)
        self.last_time = time.monotonic()
        if error is None:
            log.info(f"Checkpoint: {folder}, in {self.last_time - started:.1f} s")
            self._remove_old()
        else:
            log.error(
                f"No checkpoint of step {step}: {folder.parent} can't be written: {error}. Earlier ones are whole. "
                "Training goes on, and the next checkpoint is tried when it is due."
            )
        return error

    def _remove_old(self) -> None:
        if self.processes.is_main:
            folder, losses = self.content.folder, dict(self.content.eval_losses)
            folders = checkpoint_folders(folder)
            best = sorted((losses[step], path) for path in folders if (step := _step_of(path)) in losses)
            keep = [*folders[-self.config.keep_last :], *(path for _, path in best[: self.config.keep_best])]
            try:
                remove_checkpoints(folder, keep)
            except OSError as error:
                log.error(f"Old checkpoints can't be removed: {error}.")

    def _stop_on_signal(self, step: int, error: str | None) -> None:
        number = next((number for number in self.processes.gather(self.watch.asked) if number is not None), None)
        if number is None:
            return
        if error is None:
            raise Interrupted(number, f"Step {step} is saved: the same command goes on from there.")
        raise Interrupted(number, f"Step {step} could not be saved: {error}.")


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
