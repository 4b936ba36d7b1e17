"""The errors that a user can cause, and how each is shown.

Every class here is a `UserError`: the command line prints its message once, on rank 0 and without a traceback, and
exits with `exit_code`. Any other exception that escapes is a bug of this program and keeps its traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from qlora_fsdp.common.startup import note_ending
from qlora_fsdp.common.terminal import wrap_words
from qlora_fsdp.common.text import printable_lines


class UserError(Exception):
    """An error that the user can fix: the message names the value, the reason and the setting to change."""

    exit_code = 2
    is_shown = False  # whether any rank has printed it


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a setting.

    Attributes:
        what: the setting and its value as a user would type them, e.g. `training.global_batch_size=7`; or whatever
            else can't be used.
        reason: why it can't be used, as the end of a sentence that starts with `what`.
        fix: what to change, as a full sentence.
        setting: the dotted key, e.g. `training.global_batch_size`, for the code; empty if it is about no setting.
    """

    what: str
    reason: str
    fix: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.reason} {self.fix}".strip()


class ConfigError(UserError):
    """The configuration can't be used. Holds every problem that was found, and not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(str(self.problems[0]))
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} settings can't be used:\n{lines}")


def refuse(problems: Iterable[Problem]) -> None:
    """Raises one ConfigError about all problems that were found, if there are any."""
    if found := list(problems):
        raise ConfigError(found)


class CheckpointError(UserError):
    """A model's files can't be used: they are missing, cut short, or have other shapes than its config says."""


class AdapterError(UserError):
    """The LoRA settings do not fit this model."""


class DataError(UserError):
    """The data can't be used: there is no such file, a bad row under `data.bad_rows=error`, or no usable row."""


class DeviceError(UserError):
    """The hardware or the launch can't run this configuration: too few GPUs, no bf16, a wrong world size."""


class MemoryShortage(UserError):
    """GPU or host memory is not enough for the run. What has been written is intact."""

    exit_code = 3


class ProofError(UserError):
    """What FSDP gathers is not what the ranks hold, so that training would be silently wrong."""

    exit_code = 4


class TrainingError(UserError):
    """Training can't continue: a loss is NaN or infinite, or a parameter gets no gradient."""

    exit_code = 5


class RewardError(UserError):
    """A function that rewards answers has failed, or takes too long."""


class RunFolderError(UserError):
    """The run folder can't be written: there is no permission, or the disk is read-only or full."""


class ResumeError(UserError):
    """A run can't resume from a checkpoint: it is missing, damaged, or of another model, data or configuration."""


class LaunchError(UserError):
    """Jobs can't be started: this process is part of a run, SLURM's commands are missing, or SLURM refused them."""


class HubError(UserError):
    """The Hugging Face hub can't be reached, or does not let this user write there."""


class RankError(UserError):
    """Another rank has failed, is gone, or does not answer."""

    exit_code = 6


class Interrupted(UserError):
    """A signal ended the run: SIGINT (Ctrl-C), SIGTERM or SIGUSR1 (a batch system, or torchrun once a rank has failed).

    The exit code is the one that a shell gives for the signal: 130, 143 or 138. `detail` says what is kept.
    """

    def __init__(self, number: int, detail: str = "") -> None:
        self.number = number
        self.detail = detail
        super().__init__(f"Interrupted by {signal.Signals(number).name}. {detail}".strip())
        self.exit_code = 128 + number


class StopNow(BaseException):
    """Raised in the main thread, wherever that is, by a signal that ends the run: it becomes an `Interrupted`.

    It is no `Exception`, which trials of a model, renders of a chat template and libraries catch: a trial would count
    as failed, and the run would go on.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.detail = ""
        super().__init__(number)


def print_error(error: UserError) -> None:
    """Print an error for the user, below whatever progress line is there. It may quote the text of others."""
    prefix = "" if isinstance(error, Interrupted) else "Error: "  # Ctrl-C is no mistake
    with suppress(OSError):  # stderr may be a file on a full disk
        text = wrap_words(f"{prefix}{printable_lines(str(error))}", sys.stderr)
        print(f"\n{text}", file=sys.stderr, flush=True)
    note_ending(error.exit_code)
