"""When checkpoints are written, and how a signal ends a run.

A signal may reach a single rank. So at the end of each step all ranks agree whether one came
(`Saver.wants_checkpoint`); then they save and stop together.

A thread writes each checkpoint while training continues (thread.py). The next checkpoint, a signal and the
end of the run wait for that thread. A run that ends in an error waits for it only a few seconds.

Where the folder of a run that ends can't be written, it is saved to another one, which the message names.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import NoReturn

from torch import nn

from qlora_fsdp.common.errors import Interrupted, StopNow
from qlora_fsdp.common.files import find_room, write_elsewhere
from qlora_fsdp.model.adapters.write_adapter import gather_trainable
from qlora_fsdp.records.record_files import records_in
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.watch import Watch
from qlora_fsdp.training.checkpoints.checkpoint import Checkpoint, load_checkpoint, read_manifest
from qlora_fsdp.training.checkpoints.thread import CheckpointThread
from qlora_fsdp.training.checkpoints.write import WriteAdapter

ERROR_SECONDS = 10.0  # how long a run that ends in an error waits for a checkpoint to be finished


@dataclass(frozen=True)
class Saved:
    """The outcome of a checkpoint that was written because the run ends.

    Attributes:
        in_run_folder: whether the same command resumes from it.
        text: what to say about it: where it is, or why it is not there.
    """

    in_run_folder: bool
    text: str


class Saver:
    """Writes the checkpoints of a run. Used as a context, it waits for the last of them.

    Args:
        thread: writes them.
        watch: knows whether a signal has come to this rank, and which.
    """

    def __init__(self, thread: CheckpointThread, watch: Watch) -> None:
        self.thread, self.watch = thread, watch
        self.config = thread.config
        self.content = thread.content
        self.processes = thread.processes

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.thread.wait(goes_on=False)
        elif not isinstance(error, Interrupted | StopNow):
            with suppress(Exception):  # what ends the run is `error`
                self.thread.wait(ERROR_SECONDS, goes_on=False)

    def wants_checkpoint(self) -> bool:
        """Whether this rank wants a checkpoint after the current step: it got a signal, or every_minutes have passed.

        The loop asks every rank and sums the answers, so that all of them save after the same step.
        """
        if self.thread.has_finished:
            self.thread.wait()  # returns at once, because the thread has finished: it only reports the outcome
        minutes = self.config.every_minutes
        is_time = minutes is not None and time.monotonic() - self.thread.last_time >= 60 * minutes
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
        self.thread.start(step, _step_folder(self.content.folder, step))

    def is_signalled(self) -> bool:
        """Whether any rank got a signal to stop. Collective."""
        return self.processes.sum([self.watch.asked is not None])[0] > 0

    def stop(self, step: int) -> NoReturn:
        """Save, and end the run after `step` steps, because a rank got a signal. Collective.

        Raises:
            Interrupted: always. A checkpoint of this step has been written, if that was possible.
        """
        asked = self.processes.gather(self.watch.asked, Signals | None)
        number = next(number for number in asked if number is not None)
        saved = self.save(step)
        raise Interrupted(number, "" if saved.in_run_folder else saved.text)  # the watch says what is kept

    def save(self, step: int) -> Saved:
        """Save the state after `step` steps, because the run ends, and wait until the files are written. Collective.

        If the run folder can't be written, the checkpoint goes to another folder. If this step's checkpoint is there
        already, nothing is written.
        """
        self.thread.wait(goes_on=False)
        if step == 0:
            return Saved(False, "Before the first step there is nothing to save.")
        folder = _step_folder(self.content.folder, step)
        if self.processes.share(folder.is_dir() if self.processes.is_main else None, bool):
            return Saved(True, f"Step {step} is saved.")
        self.thread.start(step, folder)
        reason = self.thread.wait(goes_on=False)
        return Saved(True, f"Step {step} is saved.") if reason is None else self._save_elsewhere(step, reason)

    def _save_elsewhere(self, step: int, reason: str) -> Saved:
        """Save to another folder than the run's, which can't be written for this reason. Collective."""
        own, processes = self.content.folder, self.processes

        def write(folder: Path) -> str | None:
            self.thread.start(step, folder)
            return self.thread.wait(goes_on=False)

        num_bytes = int(processes.sum([self.thread.host_copy.num_bytes])[0])
        saved = save_checkpoint_elsewhere(_step_folder(own, step).name, own, num_bytes, write, processes)
        if saved is not None:
            return Saved(False, f"Step {step} can't be saved in {own}: {reason}. {saved}")
        adapter = save_adapter_elsewhere(own, self.thread.model, self.thread.write_adapter, processes) or ""
        kept = self.thread.describe_kept()
        text = f"Step {step} can't be saved in {own}: {reason}. No other folder takes it. {kept} {adapter}"
        return Saved(False, processes.share(text.strip(), str))

    def restore(self) -> int | None:
        """Load the newest checkpoint of this run into model and optimizer. Collective.

        Returns:
            Its step; None if the run has no checkpoint yet.
        """
        self.thread.wait()
        folders = checkpoint_folders(self.content.folder) if self.processes.is_main else []
        newest = self.processes.share(read_manifest(folders[-1]) if folders else None, Checkpoint | None)
        if newest is None:
            return None
        load_checkpoint(newest, self.thread.model, self.thread.optimizer, self.processes)
        return int(newest.step)


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def save_checkpoint_elsewhere(
    name: str, own: Path, num_bytes: int, write: Callable[[Path], str | None], processes: Processes
) -> str | None:
    """Write a checkpoint to the first folder that takes it. Every rank calls this.

    Args:
        name: name of the checkpoint's folder.
        own: the folder of the run's checkpoints, which can't be written.
        num_bytes: what it takes, about, over all ranks.
        write: writes it to a folder, collectively; it returns what went wrong, the same on every rank.
        processes: all ranks take part.

    Returns:
        Where it is and how to go on from there, as sentences; None if no folder takes it, or the ranks share none.
    """
    places = find_room(own.parent, num_bytes) if processes.is_main else iter(())
    while (place := processes.share(next(places, None), Path | None)) is not None:
        if write(place / name) is None:
            with suppress(OSError):
                if processes.is_main:
                    records_in(own.parent).write_rest(place)
            where = processes.share(f"{place / name} on {platform.node()}", str)
            return f"It is saved in {where}. Move it to {own} once there is room; the same command goes on from there."
    return None


def save_adapter_elsewhere(own: Path, model: nn.Module, write: WriteAdapter, processes: Processes) -> str | None:
    """Write the adapter alone, as it is now, to the first folder of rank 0 that takes it. Every rank calls this.

    Returns:
        Where it is, as a sentence; None if no folder takes it.
    """
    state, text = gather_trainable(model, processes), None
    if processes.is_main:
        num_bytes = sum(value.nbytes for value in state.values())
        place = write_elsewhere(own.parent, num_bytes, lambda folder: write(folder / "adapter", state))
        if place is not None:
            where = f"{place / 'adapter'} on {platform.node()}"
            text = f"The adapter, to use or to start from (lora.start) but not to resume, is in {where}."
    shared: str | None = processes.share(text, str | None)
    return shared
