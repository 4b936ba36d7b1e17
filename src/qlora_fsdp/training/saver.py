"""When checkpoints are written, and how a signal ends a run.

A signal may reach a single rank. So at the end of each step all ranks agree whether one came
(`Saver.wants_checkpoint`); then they save and stop together.

Training waits while the state is copied to host memory. Then it continues, and a thread on each rank writes the copy to
files. The next checkpoint, a signal and the end of the run wait for that thread. A run that ends in an error waits for
it only a few seconds. If the thread has not finished by then, or the process is killed, the files keep their temporary
name, and nothing reads them.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torch import nn, optim

from qlora_fsdp.common.errors import Interrupted
from qlora_fsdp.config.schema import CheckpointConfig
from qlora_fsdp.records.journal import Journal
from qlora_fsdp.records.run_folder import log
from qlora_fsdp.records.run_state import checkpoint_folders, step_of
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.watch import Watch
from qlora_fsdp.training.checkpoint import Checkpoint, load_checkpoint, read_manifest, remove_checkpoints
from qlora_fsdp.training.checkpoint_write import HostCopy, Snapshot, WriteAdapter, write_checkpoint
from qlora_fsdp.training.rescue import save_adapter_elsewhere, save_checkpoint_elsewhere

ERROR_SECONDS = 10.0  # how long a run that ends in an error waits for a checkpoint to be finished
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Saved:
    """The outcome of a checkpoint that was written because the run ends.

    Attributes:
        in_run_folder: whether the same command resumes from it.
        text: what to say about it: where it is, or why it is not there.
    """

    in_run_folder: bool
    text: str


@dataclass
class _Write:
    """A checkpoint that is being written.

    Attributes:
        stall_seconds: how long training waited until the state was copied.
        started: when the thread began, on the monotonic clock.
        seconds: how long the thread took.
        result: set by the thread when it ends: what went wrong, or None.
    """

    folder: Path
    step: int
    stall_seconds: float
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    result: Future[str | None] = field(default_factory=Future)


class Saver:
    """Writes the checkpoints of a run. Used as a context, it waits for the last of them.

    Args:
        config: when checkpoints are written, and how many are kept.
        content: the manifest fields that all checkpoints of this run share. Each checkpoint replaces `step`, and
            `folder`, which is run.folder/checkpoints here. `eval_losses` grows as the loop evaluates.
        model: sharded.
        optimizer: over the model's trainable parameters.
        write_adapter: writes the adapter to a folder; called in a thread of rank 0.
        processes: all ranks take part.
        watch: knows whether a signal has come to this rank, and which.
        journal: records how long each checkpoint took.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        content: Checkpoint,
        model: nn.Module,
        optimizer: optim.Optimizer,
        write_adapter: WriteAdapter,
        processes: Processes,
        watch: Watch,
        journal: Journal,
    ) -> None:
        self.config, self.content, self.model, self.optimizer = config, content, model, optimizer
        self.write_adapter, self.processes, self.watch, self.journal = write_adapter, processes, watch, journal
        self.thread_processes, self.host_copy = processes.for_thread(), HostCopy()
        self.last_time = time.monotonic()
        self._write: _Write | None = None
        self.stalls: list[float] = []
        self.write_seconds: list[float] = []
        self.num_failed = 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._wait(goes_on=False)
        elif not isinstance(error, Interrupted):
            with suppress(Exception):  # what ends the run is `error`
                self._wait(ERROR_SECONDS, goes_on=False)

    def wants_checkpoint(self) -> bool:
        """Whether this rank wants a checkpoint after the current step: it got a signal, or every_minutes have passed.

        The loop asks every rank and sums the answers, so that all of them save after the same step.
        """
        if self._write is not None and self._write.result.done():
            self._wait()  # returns at once, because the thread has finished: it only reports the outcome
        minutes = self.config.every_minutes
        is_time = minutes is not None and time.monotonic() - self.last_time >= 60 * minutes
        # Clocks differ between hosts, so only rank 0's counts.
        return self.watch.asked is not None or (is_time and self.processes.is_main)

    def is_due(self, step: int, asked: bool) -> bool:
        """Whether to call `after_step`, which takes the same arguments."""
        every = self.config.every_steps
        return asked or (every is not None and step % every == 0)

    def after_step(self, step: int, asked: bool) -> None:
        """Start a checkpoint, or save and end the run if a rank got a signal. To be called if a checkpoint `is_due`.

        Args:
            step: optimizer steps done.
            asked: whether `wants_checkpoint` was true on any rank; the same on every rank.

        Raises:
            Interrupted: a rank got a signal; the checkpoint has been written, if that was possible.
        """
        if asked and self.is_signalled():
            self.stop(step)
        self._start(step, _step_folder(self.content.folder, step))

    def is_signalled(self) -> bool:
        """Whether any rank got a signal to stop. Collective."""
        return self.processes.sum([self.watch.asked is not None])[0] > 0

    def stop(self, step: int) -> NoReturn:
        """Save, and end the run after `step` steps, because a rank got a signal. Collective.

        Raises:
            Interrupted: always. A checkpoint of this step has been written, if that was possible.
        """
        asked = self.processes.gather(self.watch.asked)
        number = next(number for number in asked if number is not None)
        saved = self.save(step)
        raise Interrupted(number, "" if saved.in_run_folder else saved.text)  # the watch says what is kept

    def save(self, step: int) -> Saved:
        """Save the state after `step` steps, because the run ends, and wait until the files are written. Collective.

        If the run folder can't be written, the checkpoint goes to another folder. If this step's checkpoint is there
        already, nothing is written.
        """
        self._wait(goes_on=False)
        if step == 0:
            return Saved(False, "Before the first step there is nothing to save.")
        folder = _step_folder(self.content.folder, step)
        if self.processes.share(folder.is_dir() if self.processes.is_main else None):
            return Saved(True, f"Step {step} is saved.")
        self._start(step, folder)
        reason = self._wait(goes_on=False)
        return Saved(True, f"Step {step} is saved.") if reason is None else self._save_elsewhere(step, reason)

    def _save_elsewhere(self, step: int, reason: str) -> Saved:
        """Save to another folder than the run's, which can't be written for this reason. Collective."""
        own, processes = self.content.folder, self.processes

        def write(folder: Path) -> str | None:
            self._start(step, folder)
            return self._wait(goes_on=False)

        num_bytes = int(processes.sum([self.host_copy.num_bytes])[0])
        saved = save_checkpoint_elsewhere(_step_folder(own, step).name, own, num_bytes, write, processes)
        if saved is not None:
            return Saved(False, f"Step {step} can't be saved in {own}: {reason}. {saved}")
        adapter = save_adapter_elsewhere(own, self.model, self.write_adapter, processes) or ""
        text = f"Step {step} can't be saved in {own}: {reason}. No other folder takes it. {self._kept()} {adapter}"
        return Saved(False, processes.share(text.strip()))

    def _kept(self) -> str:
        folders = checkpoint_folders(self.content.folder)
        return f"Step {step_of(folders[-1])} is the last that is saved." if folders else "No earlier step is saved."

    def restore(self) -> int | None:
        """Load the newest checkpoint of this run into model and optimizer. Collective.

        Returns:
            Its step; None if the run has no checkpoint yet.
        """
        self._wait()
        folders = checkpoint_folders(self.content.folder) if self.processes.is_main else []
        newest = self.processes.share(read_manifest(folders[-1]) if folders else None)
        if newest is None:
            return None
        load_checkpoint(newest, self.model, self.optimizer, self.processes)
        return int(newest.step)

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

    def _start(self, step: int, folder: Path) -> None:
        """Wait for the checkpoint before, copy the state, and start a thread that writes the copy to `folder`."""
        started = time.monotonic()
        self._wait()
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
            # A run that resumes from this checkpoint evaluates at this step again, so its loss is left out.
            eval_losses=[(at, loss) for at, loss in self.content.eval_losses if at < step],
        )
        snapshot = self.host_copy.take(self.model, self.optimizer)
        self.last_time = time.monotonic()
        self._write = write = _Write(content.folder, step, self.last_time - started)
        self.stalls.append(write.stall_seconds)
        # The thread is a daemon, so that a process that ends does not wait for a disk.
        threading.Thread(target=self._work, args=(write, content, snapshot), name="checkpoint", daemon=True).start()

    def _work(self, write: _Write, content: Checkpoint, snapshot: Snapshot) -> None:
        """Write the checkpoint, and remove those that are not kept. Runs in the thread."""
        try:
            error = write_checkpoint(content, snapshot, self.write_adapter, self.thread_processes)
            if error is None and self.processes.is_main and content.folder.parent == self.content.folder:
                self._remove_old(content)
            # The threads end together. Otherwise the other ranks' main threads would wait for rank 0, which is still
            # removing folders, in a collective with a time limit.
            self.thread_processes.wait()
        except BaseException as unexpected:
            write.result.set_exception(unexpected)
        else:
            write.seconds = time.monotonic() - write.started
            write.result.set_result(error)

    def _wait(self, at_most_seconds: float | None = None, goes_on: bool = True) -> str | None:
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
        error = write.result.result()
        if error is None:
            self.write_seconds.append(write.seconds)
            self.journal.checkpoint(write.step, write.folder, write.stall_seconds, write.seconds)
        else:
            self.num_failed += 1
            if self.processes.is_main:
                rest = " Training goes on, and the next checkpoint is tried when it is due." if goes_on else ""
                log.error(
                    f"No checkpoint of step {write.step}: {write.folder.parent} can't be written: {error}. "
                    f"{self._kept()}{rest}"
                )
        return error

    def _remove_old(self, content: Checkpoint) -> None:
        """Remove checkpoints except the newest (`keep_last`) and those of the lowest evaluation loss (`keep_best`)."""
        folder, losses = self.content.folder, dict(content.eval_losses)
        folders = checkpoint_folders(folder)
        best = sorted((losses[step], path) for path in folders if (step := step_of(path)) in losses)
        keep = [*folders[-self.config.keep_last :], *(path for _, path in best[: self.config.keep_best])]
        try:
            remove_checkpoints(folder, keep)
        except OSError as error:
            log.error(f"Old checkpoints can't be removed: {error}.")


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"
