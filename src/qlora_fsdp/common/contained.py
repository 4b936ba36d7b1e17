"""A process in which foreign files are tried: what libraries run because a file says so has limits there.

Tokenizers, chat templates and regular expressions are programs that anybody may have written, and what they cost can't
be told from their text. They run inside of libraries' C and Rust code, where nothing of Python gets a word in: no
timer, and not even Ctrl-C. So they run in another process, which serves until this one ends. The system limits its
memory and its time on the processors, this process looks at both while it waits, and kills it. So does Ctrl-C.
Whatever a library prints there, nobody sees.

It must not be forked off a process with threads of Python's, which may hold locks, or with CUDA. So a command calls
`start` once it has imported what tries files, before it imports what starts CUDA. That forks a process that does
nothing but fork others, each of which tries files: a new one costs some milliseconds, whenever the last one was killed.
To start Python anew would cost seconds of imports. Where nobody has called `start`, as in a notebook, the first call
does.

A process that tokenizes rows is one that may be killed already (data/workers.py). There, everything runs where it is,
and the system ends the process where it takes too long. Imports no torch.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from qlora_fsdp.common.limits import limited_memory
from qlora_fsdp.common.startup import end_with

SECONDS = 10.0  # of processor time, for one try; honest files take far less than one
NUM_BYTES = 2**32
WALL_RATIO = 30  # of all time to processor time: the host may be busy, or the hub slow
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SPARE_BYTES = 2**28  # with so much more than at its beginning, a process is replaced before its next try
FIRST_LOOK, LAST_LOOK = 0.02, 0.2  # seconds between two looks at the process
LIFE_SECONDS = 3600  # of processor time, after which the system ends the process for good
PID_BYTES = 8
TOO_LONG = signal.SIGVTALRM  # what ends a process that tokenizes
# What files are tried with; none of these starts CUDA or a thread.
IMPORTED = ("qlora_fsdp.data.tokenizer", "qlora_fsdp.data.chats.conversation", "qlora_fsdp.model.find")
# What transformers imports, for three seconds, to make the config of whatever model.
IMPORTED_FOR_CONFIGS = ("transformers.activations",)


class LimitError(Exception):
    """What was tried is beyond a limit. The text goes on a sentence about it: `takes more than 10 s`."""


class TryError(Exception):
    """What was tried has raised an error, of this text."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


def call(function: Callable[..., Any], *args: Any, seconds: float = SECONDS, num_bytes: int = NUM_BYTES) -> Any:
    """`function(*args)` in the process for foreign files.

    Args:
        function: of a module.
        args: plain values.
        seconds: of processor time.
        num_bytes: of memory that it may take.

    Returns:
        What it returns, which has to be JSON.

    Raises:
        LimitError: it took more, or a library has ended the process.
        TryError: it raised an error of whatever type.
    """
    if _is_worker:
        return _call_here(function, args, seconds, num_bytes)
    with _lock:
        return _process(seconds).ask(function, args, seconds, num_bytes)


def start(makes_configs: bool) -> None:
    """Makes ready for calls, before this process has threads or uses a GPU. It imports transformers.

    Args:
        makes_configs: whether configs of models will be made. What that needs is imported over there, while this
            process goes on.
    """
    global _forker
    for name in IMPORTED:
        import_module(name)
    with _lock:
        if _forker is None:
            _forker = _Forker(IMPORTED_FOR_CONFIGS if makes_configs else ())


def contain_itself() -> None:
    """Says that this process may be killed at any time: what is tried runs in itself from here on."""
    global _is_worker
    _is_worker = True
    signal.signal(TOO_LONG, signal.SIG_DFL)


def may_be_killed() -> bool:
    """Whether this process is one that tokenizes, which the system ends and Ctrl-C leaves to its parent."""
    return _is_worker


def close() -> None:
    """Ends the process that tries files, if there is one, and the one that forks; the next call starts others."""
    global _forker, _started
    if _started is not None:
        _started.kill()
        _started = None
    if _forker is not None:
        _forker.kill()
        _forker = None


def describe_seconds(seconds: float) -> str:
    """What a LimitError says of time."""
    return f"takes more than {seconds:.0f} s"


class _Forker:
    """The process off which those are forked that try files, as its parent sees it."""

    def __init__(self, imported: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where there are threads
            self.pid = os.fork()
        if self.pid == 0:
            _fork_others(theirs, parent, imported)
        theirs.close()

    def fork(self, pipe: Connection) -> int:
        """Starts a process that answers calls from a pipe. Returns its id.

        Raises:
            OSError: this one has ended.
        """
        socket.send_fds(self._socket, [bytes(PID_BYTES)], [pipe.fileno()])
        return self._receive()

    def wait_for(self, pid: int) -> int:
        """Waits for the end of a process that it has started. Returns its status, as os.waitpid has it.

        Raises:
            OSError: this one has ended.
        """
        self._socket.send(pid.to_bytes(PID_BYTES, "big"))
        return self._receive()

    def _receive(self) -> int:
        answer = self._socket.recv(PID_BYTES)
        if not answer:
            raise ConnectionError("the process that forks others has ended")
        return int.from_bytes(answer, "big")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._socket.close()


class _Contained:
    """The process that tries files, as its parent sees it."""

    def __init__(self, forker: _Forker) -> None:
        self._forker = forker
        self._pipe, theirs = Pipe()
        self.pid = forker.fork(theirs)
        theirs.close()
        self._first_bytes = self._num_bytes()

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float, num_bytes: int) -> Any:
        try:
            self._pipe.send((function, args, seconds, num_bytes, str(Path.cwd())))
            was_long = self._wait(seconds, num_bytes)
            kind, *told = json.loads(self._pipe.recv_bytes())
        except RecursionError as error:  # of values that are nested too deeply to be sent; nothing was
            raise TryError(type(error).__name__, str(error)) from None
        except (EOFError, ConnectionError):
            raise LimitError(self._explain_end(seconds)) from None
        except BaseException:  # also of signals: what the process is at is of no use any more
            _end_started()
            raise
        if kind == "memory" or (was_long and self._num_bytes() > self._first_bytes + SPARE_BYTES):
            _end_started()
        if kind == "memory":
            raise LimitError(_describe_bytes(num_bytes))
        if kind == "error":
            raise TryError(*told)
        return told[0]

    def is_worn_out(self, seconds: float) -> bool:
        """Whether it has ended, as it does with the thread that has called first, or has no such time left."""
        return self._pipe.poll(0) or self._seconds() + seconds > LIFE_SECONDS - 2

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(OSError):  # which reaps it: until then nobody else has its id
            self._forker.wait_for(self.pid)
        self._pipe.close()

    def _wait(self, seconds: float, num_bytes: int) -> bool:
        """Waits for the answer. Returns whether it was long in coming, as few are.

        Args:
            seconds: of processor time that this call may take.
            num_bytes: of memory that it may take.
        """
        if self._pipe.poll(FIRST_LOOK):
            return False
        deadline = time.monotonic() + WALL_RATIO * seconds
        end, most_bytes = self._seconds() + seconds, self._first_bytes + SPARE_BYTES + num_bytes
        pause = FIRST_LOOK
        while not self._pipe.poll(pause):
            pause = min(2 * pause, LAST_LOOK)
            if self._seconds() > end:
                raise LimitError(describe_seconds(seconds))
            if time.monotonic() > deadline:
                raise LimitError(describe_seconds(WALL_RATIO * seconds))
            if self._num_bytes() > most_bytes:
                raise LimitError(_describe_bytes(num_bytes))
        return True

    def _explain_end(self, seconds: float) -> str:
        """Why the process is gone."""
        global _started
        _started = None
        self._pipe.close()
        try:
            status = self._forker.wait_for(self.pid)
        except OSError:
            return "ends the process that tries it, as for want of memory"
        number = -os.waitstatus_to_exitcode(status)
        if number == signal.SIGXCPU:
            return describe_seconds(seconds)
        name = next((known.name for known in signal.Signals if known == number), f"exit code {-number}")
        return f"ends the process that tries it ({name}), as for want of memory"

    def _seconds(self) -> float:
        """Processor time that the process has taken."""
        with suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
        return 0.0

    def _num_bytes(self) -> int:
        """Memory that the process has to itself: what it has written, and what was mapped for it to write."""
        with suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[5]) * resource.getpagesize()
        return 0


_lock = threading.RLock()
_forker: _Forker | None = None
_started: _Contained | None = None
_is_worker = False


def _end_started() -> None:
    """Ends the process that tries files. The next one is forked off the same early process as this one was."""
    global _started
    ended = _started
    _started = None
    if ended is None:
        return
    try:
        ended.kill()
    except BaseException:  # a signal while the other process was asked: its answer would be taken for a later one
        close()
        raise


def _process(seconds: float) -> _Contained:
    global _forker, _started
    if _started is not None and _started.is_worn_out(seconds):
        _end_started()
    if _started is None:
        if _forker is None:
            _forker = _Forker()
        try:
            _started = _Contained(_forker)
        except OSError:  # it has ended with the thread that has called first
            _forker.kill()
            _forker = _Forker()
            _started = _Contained(_forker)
    return _started


def _forget() -> None:
    """Called in a process that was forked off this one, whose processes for foreign files are not its own."""
    global _forker, _started, _lock
    _forker = None
    _started = None
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget)


def _fork_others(channel: socket.socket, parent: int, imported: Sequence[str]) -> NoReturn:
    """Imports modules, forks a process for each pipe that is sent, and waits for those that are named."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # they come to all processes of a job; the parent kills this one
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who has it ignored can't wait for anything
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        end_with(parent, signal.SIGKILL)
        _close_files(channel.fileno())
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what a try imports starts no CUDA
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that this process has not got would be waited for
        os.environ["TQDM_DISABLE"] = "1"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        gc.disable()
        for name in imported:
            import_module(name)
        gc.freeze()  # else collecting garbage would copy the pages that are shared with the parent
        gc.enable()  # which the parent may have turned off while it imported
        own = os.getpid()
        while True:
            message, files, _, _ = socket.recv_fds(channel, PID_BYTES, 1)
            if not message:
                os._exit(0)
            answer = int.from_bytes(message, "big")
            if answer:
                _, answer = os.waitpid(answer, 0)
            else:
                answer = os.fork()
                if answer == 0:
                    channel.close()
                    _serve(Connection(files[0]), own)
                os.close(files[0])
            channel.send(answer.to_bytes(PID_BYTES, "big"))
    except BaseException:  # as a rule the parent is gone
        os._exit(1)


def _serve(pipe: Connection, parent: int) -> NoReturn:
    """Answers calls, in the process for foreign files."""
    try:
        end_with(parent, signal.SIGKILL)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        life = LIFE_SECONDS if most == resource.RLIM_INFINITY else min(LIFE_SECONDS, most)
        resource.setrlimit(resource.RLIMIT_CPU, (life, life))
        limited_to = 0
        while True:
            function, args, seconds, num_bytes, folder = pipe.recv()
            os.chdir(folder)  # the parent may have gone elsewhere since, and paths may be relative
            if num_bytes != limited_to:
                _limit_memory(num_bytes)
                limited_to = num_bytes
            _limit_time(seconds)
            pipe.send_bytes(_answer(function, args))
    except BaseException:  # as a rule the parent is gone
        os._exit(1)


def _close_files(kept: int) -> None:
    """Closes all files but one: whoever is connected to the parent is to notice that it ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit_time(seconds: float) -> None:
    """Has the system end this process where its parent can't, after a second more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(end, most), most))


def _limit_memory(num_bytes: int) -> None:
    """Has the system refuse more memory than that."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    size = mapped + SPARE_BYTES + num_bytes
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if most == resource.RLIM_INFINITY else min(size, most), most))


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        answer = ["value", function(*args)]
        return json.dumps(answer).encode()
    except MemoryError:
        return b'["memory"]'
    except BaseException as error:  # Rust's panics are no Exception
        return json.dumps(["error", type(error).__name__, str(error) or repr(error)]).encode()


def _call_here(function: Callable[..., Any], args: tuple[Any, ...], seconds: float, num_bytes: int) -> Any:
    """`call` in a process that the system may end."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with limited_memory(num_bytes):
            return function(*args)
    except MemoryError:
        raise LimitError(_describe_bytes(num_bytes)) from None
    except Exception as error:
        raise TryError(type(error).__name__, str(error) or repr(error)) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _describe_bytes(num_bytes: int) -> str:
    return f"takes more than {num_bytes / 2**30:.0f} GiB"
