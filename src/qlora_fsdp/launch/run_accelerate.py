"""`python -m qlora_fsdp.launch.run_accelerate`: `accelerate launch`, which ends with the message of a rank alone.

accelerate and torchrun end with a traceback and a table wherever a rank has failed, below the message that says why,
and with exit code 1. This module calls accelerate in its own process, prints neither, and ends with the rank's exit
code. Only where no rank was able to print a message, it prints one.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qlora_fsdp.common.errors import Interrupted, LaunchError, RankError, UserError, print_error
from qlora_fsdp.common.own_folder import leave_folder, make_folder
from qlora_fsdp.common.run_key import NODE_FOLDER, NODE_KEY
from qlora_fsdp.common.startup import (
    ENDING_FILE,
    LEFT_TO_RANKS,
    LOOKS_FOR_GPUS,
    NO_RUN,
    PARENT_PID,
    end_with_parent,
    leave_working_folder_out,
    quick_imports,
)
from qlora_fsdp.common.text import name_error
from qlora_fsdp.runtime.signals import SIGNALS


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks as `accelerate launch` does: 0, or the exit code of the rank that failed first."""
    own = make_folder()
    ending = own.path / "ending"
    os.environ[PARENT_PID] = str(os.getpid())
    os.environ[ENDING_FILE] = str(ending)
    os.environ[NODE_KEY] = own.key
    os.environ[NODE_FOLDER] = str(own.path)
    try:
        _launch(argv, own.path)
    except RankFailed as failed:
        has_printed_why = ending.is_file()
        if has_printed_why:
            return int(ending.read_text() or failed.exit_code)
        return failed.explain()
    except UserError as error:
        print_error(error)
        return error.exit_code
    finally:
        leave_folder()
    return 0


@dataclass(eq=False)
class RankFailed(Exception):
    """A rank has ended with this exit code, which is negative for a signal, as Python's subprocesses have it."""

    rank: int
    exit_code: int
    pid: int | None

    def explain(self) -> int:
        """Prints why the run ended, as far as it can be seen from here, and returns the exit code for it."""
        number = self.exit_code - 128 if self.exit_code > 128 else -self.exit_code
        if self.exit_code > 0 and number not in SIGNALS:
            return self.exit_code  # there is a traceback, or the message is in the output of another host
        error: UserError = Interrupted(number, NO_RUN)
        if number not in SIGNALS:
            name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
            process = "its process" if self.pid is None else f"process {self.pid}"
            hint = "Lines above may say more."
            if number == signal.SIGKILL:
                hint = "If it was for want of memory, dmesg says so."
            error = RankError(f"rank {self.rank} was ended by {name}: {process} said no word. {hint}")
        print_error(error)
        return error.exit_code


def _launch(argv: Sequence[str] | None, folder: Path) -> None:
    """Call accelerate's launcher.

    Args:
        argv: its command line.
        folder: of this user alone, for what the launcher would otherwise keep where others can connect to it.

    Raises:
        RankFailed: a rank has failed, or a signal came to this process. All ranks have ended.
        LaunchError: the ranks can't be started.
    """
    with quick_imports():
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from qlora_fsdp.launch.rendezvous import LauncherArguments, meet_apart

    logging.disable()  # torch's logs here are about ranks that end
    os.environ.setdefault(LOOKS_FOR_GPUS, "1")
    arguments = launch_command_parser().parse_args(argv, namespace=LauncherArguments())
    meet_apart(arguments, folder)
    try:
        launch_command(arguments)
    except ChildFailedError as error:  # of several ranks
        rank, failure = error.get_first_failure()
        raise RankFailed(rank, failure.exitcode, failure.pid) from None
    except subprocess.CalledProcessError as error:  # of a single one
        raise RankFailed(0, error.returncode, None) from None
    except SignalException as error:
        raise RankFailed(0, -error.sigval, None) from None
    except LaunchError:
        raise
    except Exception as error:
        reason = name_error(error).rstrip(".")
        raise LaunchError(f"accelerate can't start the ranks: {reason}. Look at launch.config_file.") from None


if __name__ == "__main__":
    leave_working_folder_out()
    end_with_parent()
    # These are for the ranks, which inherit that they are blocked and let them in once they have begun. A batch system
    # sends SIGUSR1 to every process of a job step, and the ranks can't save once this one, where they meet, is gone.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_RANKS)
    sys.exit(main())
