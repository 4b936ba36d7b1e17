"""The errors a user can cause, and how each is shown.

Everything here is a `UserError`: the command line prints its message once, on rank 0, without a traceback, and exits
with `exit_code`. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


class UserError(Exception):
    """An error the user can fix: the message names the value, the reason and the setting to change."""

    exit_code = 2
    is_shown = False  # it has been printed, by whichever rank


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a setting.

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
    """The configuration can't be used. Holds every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(str(self.problems[0]))
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} settings can't be used:\n{lines}")


class CheckpointError(UserError):
    """A model folder or its files can't be used: missing, cut short, or of other shapes than its config says."""


class AdapterError(UserError):
    """The LoRA settings do not fit this model."""


class DataError(UserError):
    """The data can't be used: no such file, bad rows under `data.bad_rows=error`, or no usable row."""


class DeviceError(UserError):
    """The hardware or the launch can't run this configuration: too few GPUs, no bf16, wrong world size."""


class MemoryShortage(UserError):
    """Not enough GPU or host memory for the run; what was written is intact."""

    exit_code = 3


class ProofError(UserError):
    """The proof at start failed: what FSDP gathers is not what the ranks hold. Training would be silently wrong."""

    exit_code = 4


class TrainingError(UserError):
    """Training can't go on: a NaN or infinite loss, or a parameter that gets no gradient."""

    exit_code = 5


class RunFolderError(UserError):
    """The run folder can't be written: no permission, read-only, or full."""


class ResumeError(UserError):
    """A checkpoint of a run can't be gone on from: missing, damaged, or of another model, data or configuration."""


class LaunchError(UserError):
    """Jobs can't be started from here: inside a run, or without SLURM's commands; or SLURM refused them."""


class RankError(UserError):
    """Another rank failed, is gone, or does not answer."""

    exit_code = 6


class Interrupted(UserError):
    """A signal ended the run: SIGINT (Ctrl-C), SIGTERM or SIGUSR1 (a batch system, or torchrun once a rank has failed).

    The exit code is the shell's for it: 130, 143 or 138. `detail` says what is kept.
    """

    def __init__(self, number: int, detail: str = "") -> None:
        self.number, self.detail = number, detail
        super().__init__(f"Interrupted by {signal.Signals(number).name}. {detail}".strip())
        self.exit_code = 128 + number


def print_error(error: UserError) -> None:
    """Show an error to the user, below whatever progress line is there."""
    with suppress(OSError):  # a file on a full disk
        print(f"\nError: {error}", file=sys.stderr, flush=True)
