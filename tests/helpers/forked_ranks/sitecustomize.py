"""Lets a launcher of ranks import the libraries once and fork the ranks, each of which would import them anew.

Python imports this at its start where this folder is on PYTHONPATH, as in the commands that tests start. In a launcher
`subprocess.Popen` then forks what is `python -m qlora_fsdp...` and a rank, in place of starting it: with its own
arguments, environment and session, with nothing open but the standard streams, and without the launcher's handlers of
signals. So a launch on two ranks takes half of the processor time. All other processes are started as ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

LAUNCHERS = ("qlora_fsdp.launch.run_accelerate", "accelerate.commands.launch", "torch.distributed.run")
FIRST_OPEN = 3  # behind the standard streams
NO_FILES = 2**16  # more than a process has open
SET_NAME = 15  # prctl's PR_SET_NAME


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process, which is forked if it is a rank."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        environment = rest[5]
        if not is_rank(args, environment):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        from qlora_fsdp.common.startup import quick_imports

        with quick_imports():
            import_module("qlora_fsdp.training.run")
            import_module("transformers.models.llama.modeling_llama")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            become_rank(args, environment)
        self._child_created = True


def is_rank(args: Any, environment: Mapping[str, str] | None) -> bool:
    """Whether these start a rank of this package's, on the CPU: libraries that have seen a GPU can't be forked."""
    if not isinstance(args, (list, tuple)) or environment is None or "-m" not in args:
        return False
    is_ours = args[0] == sys.executable and str(args[args.index("-m") + 1]).startswith("qlora_fsdp.")
    return is_ours and "RANK" in environment and environment.get("CUDA_VISIBLE_DEVICES") == ""


def become_rank(args: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Goes on as the process that the arguments would have started."""
    import ctypes
    import logging
    import random
    import runpy
    import signal
    import traceback

    exit_code: Any = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(SET_NAME, f"rank {environment['RANK']}".encode())
        os.closerange(FIRST_OPEN, NO_FILES)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.disable(logging.NOTSET)
        random.seed()
        os.environ.clear()
        os.environ.update(environment)
        module = args[args.index("-m") + 1]
        sys.argv = [module, *args[args.index("-m") + 2 :]]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if not set(LAUNCHERS).isdisjoint(sys.orig_argv):
    subprocess.Popen = Popen  # type: ignore[misc]
