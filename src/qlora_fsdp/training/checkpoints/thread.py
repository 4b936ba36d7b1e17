"""Write checkpoints in a thread, one at a time, while training continues.

Training waits while the state is copied to host memory. A thread on each rank then writes this copy to files. If a
process ends before its thread has finished, the files keep their temporary name, and nothing reads them.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn, optim

from qlora_fsdp.common import threads
from qlora_fsdp.config.criterion import Criterion
from qlora_fsdp.config.schema import CheckpointConfig
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_state import checkpoint_folders, step_of
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, remove_checkpoints
from qlora_fsdp.training.checkpoints.write import HostCopy, Snapshot, WriteAdapter, write_checkpoint

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is being written.

    Attributes:
        stall_seconds: how long training waited until the state was copied.
        result: what went wrong, or None, and how long the thread took.
    """

    folder: Path
    step: int
    stall_seconds: float
    result: Future[tuple[str | None, float]]


class CheckpointThread:
    """Copies the state of training and writes it to files in a thread. All ranks call it together.

    Args:
        config: when checkpoints are written, and how many are kept.
        content: the manifest fields that all checkpoints of this run share. Each checkpoint replaces `step`, and
            `folder`, which is run.folder/checkpoints here. `eval_losses` and `eval_metrics` grow as the
            loop evaluates.
        model: sharded.
        optimizer: over the model's trainable parameters.
        write_adapter: writes the adapter to a folder; called in the thread of rank 0.
        processes: all ranks take part.
        journal: records how long each checkpoint took.
        criterion: which checkpoints are the best.

    Attributes:
        last_time: when the state was last copied, on the monotonic clock.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        content: Checkpoint,
        model: nn.Module,
        optimizer: optim.Optimizer,
        write_adapter: WriteAdapter,
        processes: Processes,
        journal: Journal,
        criterion: Criterion,
    ) -> None:
        self.config = config
        self.criterion = criterion
        self.content = content
        self.model = model
        self.optimizer = optimizer
        self.write_adapter = write_adapter
        self.processes = processes
        self.journal = journal
        self.thread_processes, self.host_copy = processes.for_thread(), HostCopy()
        self.last_time = time.monotonic()
        self._write: _Write | None = None
        self.stalls: list[float] = []
        self.write_seconds: list[float] = []
        self.num_failed = 0

    @property
    def has_finished(self) -> bool:
        """Whether the thread has ended, and `wait` has not recorded the outcome yet."""
        return self._write is not None and self._write.result.done()

    def start(self, step: int, folder: Path) -> None:
        """Wait for the checkpoint before, copy the state, and start a thread that writes the copy to `folder`."""
        started = time.monotonic()
        self.wait()
        waited = time.monotonic() - started
        if waited > 1.0:
            log.warning(
                f"Step {step} waited {waited:.1f} s for the checkpoint before it to be written: "
                "checkpoint.every_steps or every_minutes is too low for this disk."
            )
        content = replace(
            self.content,
            folder=folder,
            step=step,
            # A run that resumes from this checkpoint evaluates at this step again, so its figures are left out.
            eval_losses=[(at, loss) for at, loss in self.content.eval_losses if at < step],
            eval_metrics=[(at, metrics) for at, metrics in self.content.eval_metrics if at < step],
        )
        snapshot = self.host_copy.take(self.model, self.optimizer)
        self.last_time = time.monotonic()
        self.stalls.append(self.last_time - started)
        result = threads.begin_call(partial(self._work, content, snapshot), "checkpoint")
        self._write = _Write(folder, step, self.stalls[-1], result)

    def wait(self, at_most_seconds: float | None = None, goes_on: bool = True) -> str | None:
        """Wait for the thread, if there is one, and record the outcome in the journal and the log.

        Args:
            at_most_seconds: None for however long it takes.
            goes_on: whether the message about a failure says that training goes on.

        Returns:
            What went wrong, the same on every rank. None if nothing did, if there is no thread, or if time ran out.
        """
        write, deadline = self._write, time.monotonic() + (at_most_seconds or 0.0)
        if write is None:
            return None
        while not write.result.done():
            if at_most_seconds is not None and time.monotonic() > deadline:
                return None
            with suppress(NotYet):  # signals are handled between two waits
                write.result.result(POLL_SECONDS)
        self._write = None
        error, seconds = write.result.result()
        if error is None:
            self.write_seconds.append(seconds)
            self.journal.checkpoint(write.step, write.folder, write.stall_seconds, seconds)
        else:
            self.num_failed += 1
            if self.processes.is_main:
                rest = " Training goes on, and the next checkpoint is tried when it is due." if goes_on else ""
                log.error(
                    f"No checkpoint of step {write.step}: {write.folder.parent} can't be written: {error}. "
                    f"{self.describe_kept()}{rest}"
                )
        return error

    def describe_kept(self) -> str:
        """Which step is the last that is saved, as a sentence."""
        folders = checkpoint_folders(self.content.folder)
        return f"Step {step_of(folders[-1])} is the last that is saved." if folders else "No earlier step is saved."

    def describe(self) -> dict[str, Any]:
        """Figures for summary.json: checkpoints written and failed, longest stall of training, longest write."""
        if not self.stalls:
            return {}
        return {
            "written": len(self.write_seconds),
            "failed": self.num_failed,
            "max_stall_seconds": round(max(self.stalls), 3),
            "max_write_seconds": round(max(self.write_seconds, default=0.0), 3),
        }

    def _work(self, content: Checkpoint, snapshot: Snapshot) -> tuple[str | None, float]:
        """Write the checkpoint, and remove those that are not kept. Runs in the thread.

        Returns:
            What went wrong, or None, and how long this took.
        """
        started = time.monotonic()
        error = write_checkpoint(content, snapshot, self.write_adapter, self.thread_processes)
        if error is None and self.processes.is_main and content.folder.parent == self.content.folder:
            self._remove_old(content)
        # The threads end together. Otherwise the other ranks' main threads would wait for rank 0, which is still
        # removing folders, in a collective with a time limit.
        self.thread_processes.wait()
        return error, time.monotonic() - started

    def _remove_old(self, content: Checkpoint) -> None:
        """Remove checkpoints except the newest (`keep_last`) and the best by the evaluations (`keep_best`)."""
        folder = self.content.folder
        costs = self.criterion.costs(content.eval_losses, content.eval_metrics)
        folders = checkpoint_folders(folder)
        evaluated = [(costs[step], path) for path in folders if (step := step_of(path)) in costs]
        best = sorted(each for each in evaluated if each[0] < math.inf)
        keep = [*folders[-self.config.keep_last :], *(path for _, path in best[: self.config.keep_best])]
        try:
            remove_checkpoints(folder, keep)
        except OSError as error:
            log.error(f"Old checkpoints can't be removed: {error}.")
