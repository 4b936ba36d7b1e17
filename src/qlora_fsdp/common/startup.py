"""How a command starts: from its own modules only, with a line on the screen, and with a clean end on Ctrl-C.

`qlora-fsdp` starts ranks through a launcher, and tells them about itself in environment variables, the names of which
are here.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from qlora_fsdp import __version__

NO_RUN = "No run was going on."
KEPT = "What is tokenized is kept: the same command goes on from there."
# Set for the processes that `qlora-fsdp` starts
PARENT_PID = "QLORA_FSDP_PARENT_PID"  # this process ends soon after the one with this id, which has started it
ENDING_FILE = "QLORA_FSDP_ENDING_FILE"  # the process that prints why the run ends notes the exit code there
IS_ANNOUNCED = "QLORA_FSDP_IS_ANNOUNCED"  # the first line has been printed
# Torch's own name: asked whether there are GPUs, it only looks for them. To start CUDA takes the launcher 0.4 seconds.
# Ranks do start it, because a GPU may be there and not work.
LOOKS_FOR_GPUS = "PYTORCH_NVML_BASED_CUDA_CHECK"

LEFT_TO_RANKS = (signal.SIGINT, signal.SIGUSR1)  # our launcher blocks these, for itself and for what it starts

_PR_SET_PDEATHSIG = 1
NO_COMPILER = "TORCHDYNAMO_DISABLE"
SECONDS_BETWEEN_BARS = "30"  # in a log file, where every state of a progress bar stays


@contextmanager
def quick_imports() -> Iterator[None]:
    """Wraps the import of torch and of what is built on it, which then takes a third less time.

    The garbage collector is off meanwhile: it would look again and again through objects that stay. Afterwards it
    leaves them alone. Nor does torch import its compiler, for which bitsandbytes asks by putting torch.compile around
    fallbacks that nothing here calls. And scipy seems not to be installed: transformers would import it for losses of
    object detection, for 0.4 seconds.
    """
    is_first_import = "torch" not in sys.modules
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", SECONDS_BETWEEN_BARS)
    # It warns that a kernel for 4-bit inference on CPUs is missing, which nothing here calls either.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # Without a library for the GPU it prints a traceback; `fallbacks.py` and doctor say the same in one line.
    logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL)
    # Where rank 0 is gone, the others say so in one line. torch's warning above it has tens, most of them addresses.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    is_ours = NO_COMPILER not in os.environ
    os.environ.setdefault(NO_COMPILER, "1")
    hides_scipy = not {"scipy", "transformers"} & sys.modules.keys()  # transformers may have found it already
    if hides_scipy:
        sys.modules["scipy"] = None  # type: ignore[assignment]  # Python takes it for a module that is not there
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if is_first_import:  # else there may be garbage of an earlier command, which is to be found
            gc.freeze()
            atexit.register(gc.unfreeze)  # or Triton would tell of objects that are still there when Python ends
        if hides_scipy:
            sys.modules.pop("scipy", None)
        if is_ours:
            os.environ.pop(NO_COMPILER, None)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether accelerate or torchrun has started this process as one of a run's."""
    return "RANK" in environ or "ACCELERATE_MIXED_PRECISION" in environ


def is_first_rank() -> bool:
    """Whether this process prints what a run says once: it is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def begin(detail: str = "") -> None:
    """Does what every command does first, before it imports anything large.

    Args:
        detail: what Ctrl-C says besides, until another handler is set.
    """
    leave_working_folder_out()
    # Where this package is installed, transformers and bitsandbytes fetch code from the hub by it, and run that. To
    # Python it is a module that is not there.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    if PARENT_PID in os.environ:
        os.environ.pop(LOOKS_FOR_GPUS, None)
    _mend_streams()
    end_with_parent()
    _end_at_once(detail)


def _mend_streams() -> None:
    """Opens the null device where a standard stream is closed, and lets stdout take letters that its encoding has not.

    A file that is opened next would take the place of a closed stream, and get what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)  # ranks and their launcher would find it closed
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a locale may be ASCII


def leave_working_folder_out() -> None:
    """Takes the working folder out of where Python looks for modules, for this process and those that it starts.

    `python -m` puts it first. A folder that was downloaded may hold a `kernels.py` or `hydra_plugins/` of its own,
    which libraries would import from there. Python has an option for this from 3.11 on.
    """
    here = Path.cwd()
    if Path(__file__).parents[2] == here:
        return  # this package itself is found there
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry) != here]


def end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process, which then saves and stops, once the launcher has ended."""
    if (pid := os.environ.get(PARENT_PID)) is not None:
        end_with(int(pid), signal.SIGTERM)


def is_orphan() -> bool:
    """Whether the launcher that has started this process, and whose end is to be its own, is gone."""
    return os.environ.get(PARENT_PID, str(os.getppid())) != str(os.getppid())


def end_with(parent: int, number: signal.Signals) -> None:
    """Lets the kernel send a signal to this process once its parent has ended, or ends it if that was before."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() == 1 != parent:
        os._exit(128 + number)


def announce(num_ranks: int | None) -> None:
    """Prints the first line, once, on rank 0: importing torch takes seconds in which nothing else would be seen.

    It goes to stderr, because the stdout of some commands is their result.
    """
    if IS_ANNOUNCED in os.environ or "torch" in sys.modules or not is_first_rank():
        return
    os.environ[IS_ANNOUNCED] = "1"
    ranks = f", {num_ranks} ranks" if num_ranks is not None and num_ranks > 1 else ""
    with suppress(OSError):
        print(f"qlora-fsdp {__version__}{ranks}: importing torch ...", file=sys.stderr, flush=True)


def note_ending(exit_code: int) -> None:
    """Notes, for the launcher, that this process has printed why the run ends."""
    if file := os.environ.get(ENDING_FILE):
        with suppress(OSError):
            Path(file).write_text(str(exit_code))


def end_process(exit_code: int) -> NoReturn:
    """Ends this process at once, when a command is done and has closed what it opened.

    Python would first take itself apart. A thread of a library that is inside C++ then can abort the process, whose
    exit code is lost: two of seven runs on an H200 ended with "terminate called without an active exception" after
    they had finished.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is to be said has been said
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads on, or the disk is full
            stream.flush()
    os._exit(exit_code)


def _end_at_once(detail: str) -> None:
    """Lets SIGINT end this process with one line and the exit code of a shell, until another handler is set.

    Without it, Ctrl-C during the imports that a command begins with would print their tracebacks.
    """
    signal.signal(signal.SIGINT, partial(_end, os.getpid(), f"Interrupted by SIGINT. {detail}".strip()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_RANKS)


def end_with_the_reader() -> None:
    """Let a command that only prints end silently once nobody reads on, as in `... | head`.

    Python would end with a traceback of BrokenPipeError. Not for commands that write files or talk to other processes.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _end(main_pid: int, text: str, number: int, frame: FrameType | None) -> None:
    if is_first_rank() and os.getpid() == main_pid:  # worker processes say nothing
        with suppress(OSError, RuntimeError):  # the signal may come while stdout is being written
            sys.stdout.flush()
        os.write(2, f"\n{text}\n".encode())
        note_ending(128 + number)
    os._exit(128 + number)
