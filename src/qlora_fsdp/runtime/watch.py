"""Ends a run on all ranks when one fails, with one message that says which and why.

A rank that waits in a collective runs no Python: it sees neither a signal nor that another rank is gone. So each rank
has a thread that looks for both, and for what other ranks say, through the store where the processes met (no collective
is needed):

    failure      the first failure of any rank; what follows from it on other ranks is not worth a message
    shown        it has been printed and recorded
    lost/<rank>  this rank has lost contact: it is not the one that is stuck

The thread ends no healthy run: it acts on a signal, on another rank's word, or on the end of another rank of this host.
Once it is told to `be_patient` the first signals are only kept, for the loop to stop at the end of a step.
"""

from __future__ import annotations

import _thread
import json
import logging
import os
import platform
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from qlora_fsdp.common.errors import Interrupted, RankError, UserError, print_error
from qlora_fsdp.runtime.processes import Processes

log = logging.getLogger("qlora_fsdp")

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # for the other ranks to say that they failed, or printed
UNWIND_SECONDS = 5.0  # for the main thread to notice by itself; torchrun kills 30 s after its SIGTERM
CLEAN_UP_SECONDS = 20.0  # for it to close what is open

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Failure:
    """Why the run ends.

    Attributes:
        rank: the rank that tells it.
        text: its message.
        exit_code: of every rank.
        is_of_others: the message is about other ranks, which can't tell it themselves.
    """

    rank: int
    text: str
    exit_code: int
    is_of_others: bool = False


class Watch:
    """From its start on, signals and failures of other ranks end this rank too.

    Args:
        processes: all ranks take part in the start.
        record: called with the failure that ends the run, on one rank: the lowest that is left.
        kept: called when a signal ends the run at once; it says what there is to resume from.

    Attributes:
        asked: the signal that asked to stop since `be_patient()`.
    """

    def __init__(
        self,
        processes: Processes,
        record: Callable[[BaseException], None] = lambda error: None,
        kept: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.num_ranks = processes.rank, processes.num_ranks
        self.record, self.kept = record, kept
        # The thread has a connection of its own: a store's calls wait for one another.
        self.store = PrefixStore("watch", processes.store.clone())  # type: ignore[attr-defined]  # not in the stubs
        host = (platform.node(), Path("/proc/self/ns/pid").stat().st_ino)
        self.places: list[tuple[tuple[str, int], int]] = processes.gather((host, os.getpid()))
        self.neighbours = {
            rank: psutil.Process(pid)
            for rank, (where, pid) in enumerate(self.places)
            if where == host and rank != self.rank
        }
        self._unwinding, self._stopped = threading.Event(), threading.Event()
        self._interrupted = False
        self._is_patient, self._notice = False, ""
        self.asked: signal.Signals | None = None
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._work, name="watch", daemon=True).start()

    def be_patient(self, notice: str) -> None:
        """From here on signals do not end the run, but for a second SIGINT: the first one is in `asked`.

        Args:
            notice: what is told of a signal: what happens now.
        """
        self._is_patient, self._notice = True, notice

    def stop(self) -> None:
        """Watch no more: the run is over on this rank."""
        if not self._stopped.is_set():
            self._stopped.set()
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _leave(self) -> None:
        """In a worker process, which this one ends: a Ctrl-C, which a terminal sends to all, is not its concern."""
        self.stop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def explain(self, error: BaseException) -> BaseException:
        """What ended the run, given what was raised here; other ranks are told, and it is recorded and printed once.

        Returns:
            `error` itself where it is the first failure of any rank, else a RankError that says which was.
        """
        self._unwinding.set()
        self._is_patient = False
        if (interrupted := _find_interrupted(error)) is not None:
            error = interrupted if interrupted.detail else Interrupted(interrupted.number, self.kept())
        try:
            if isinstance(error, Interrupted) or _is_lost_contact(error):
                first = self._find_cause(error)
            else:
                first = self._tell(_describe(error), getattr(error, "exit_code", 1))
            gone = self._gone()
        except (dist.DistError, RuntimeError) as store_error:  # without an agent of torchrun's, rank 0 holds the store
            text = f"rank 0 is gone: its store can't be reached ({_first_line(store_error)})."
            first, gone = Failure(self.rank, text, RankError.exit_code, is_of_others=True), [0]
        if not first.is_of_others and (first.rank == self.rank or str(error) == first.text):
            result = error
        else:
            result = RankError(first.text if first.is_of_others else f"rank {first.rank}: {first.text}")
            result.exit_code = first.exit_code
        is_lowest_left = self.rank == min(rank for rank in range(self.num_ranks) if rank not in gone)
        if not self._is_shown(wait_seconds=0 if is_lowest_left else ANSWER_SECONDS):
            self.record(result)
            if isinstance(result, UserError):
                print_error(result)
            with suppress(dist.DistError, RuntimeError):
                self.store.set("shown", "")
        if isinstance(result, UserError):
            result.is_shown = True
        return result

    def _tell(self, text: str, exit_code: int, is_of_others: bool = False) -> Failure:
        """Tell all ranks of a failure; the first that was told."""
        mine = json.dumps(asdict(Failure(self.rank, text, exit_code, is_of_others)))
        return Failure(**json.loads(self.store.compare_set("failure", "", mine)))

    def _told(self) -> Failure | None:
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def _find_cause(self, error: BaseException) -> Failure:
        """Look for what is behind a signal or a lost connection: the failure of another rank, or its end."""
        self.store.set(f"lost/{self.rank}", "")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if (told := self._told()) is not None:
                return told
            if gone := self._gone():
                return self._tell_of(gone, "is gone", "ended without a word. It was killed, perhaps for want of memory")
            if isinstance(error, Interrupted):
                return self._tell(str(error), error.exit_code)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        silent = [rank for rank in range(self.num_ranks) if not self.store.check([f"lost/{rank}"])]
        if silent:
            return self._tell_of(silent, "does not answer", f"was waited for: {_first_line(error)}")
        text = f"The ranks lost contact with one another: {_first_line(error)}."
        return self._tell(text, RankError.exit_code, is_of_others=True)

    def _tell_of(self, ranks: list[int], verdict: str, what: str) -> Failure:
        lines = []
        for rank in ranks:
            (host, _), pid = self.places[rank]
            state = _state(self.neighbours[rank]) if rank in self.neighbours else None
            is_in_state = "" if state in (None, psutil.STATUS_ZOMBIE) else f" (it is {state})"
            lines.append(f"rank {rank} {verdict}: process {pid} on {host}{is_in_state} {what}.")
        return self._tell("\n".join(lines), RankError.exit_code, is_of_others=True)

    def _gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        return [rank for rank, process in self.neighbours.items() if _state(process) in (None, psutil.STATUS_ZOMBIE)]

    def _is_shown(self, wait_seconds: float) -> bool:
        """Whether a rank has printed and recorded the failure, or does so within this time."""
        deadline = time.monotonic() + wait_seconds
        with suppress(dist.DistError, RuntimeError):
            while not self.store.check(["shown"]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.1)
            return True
        return False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_patient:  # the thread decides
            return
        if not self._interrupted and not self._unwinding.is_set():  # a second one would break off the cleaning up
            self._interrupted = True
            raise Interrupted(number)

    def _work(self) -> None:
        """The thread: wait for a reason to end, give the main thread time to end the run, and else do it from here."""
        number = None
        while number is None:
            ready, _, _ = select.select([self._read_end], [], [], POLL_SECONDS)
            if self._stopped.is_set():
                return
            if ready:
                caught = os.read(self._read_end, 1)[0]
                number = self._judge(signal.Signals(caught)) if caught in SIGNALS else None  # a library's: SIGCHLD
            elif self.num_ranks > 1 and self._has_failed():
                number = signal.SIGTERM
                self._interrupt(number)
        error: BaseException = Interrupted(number)
        if not self._unwinding.wait(UNWIND_SECONDS):
            error = self.explain(error)
        elif self._stopped.wait(CLEAN_UP_SECONDS):
            return
        sys.stdout.flush()
        os._exit(getattr(error, "exit_code", 1))

    def _judge(self, number: signal.Signals) -> signal.Signals | None:
        """The signal if it ends the run now; None if it waits for the end of the step."""
        if not self._is_patient:
            return number
        if self.asked is not None and number == signal.SIGINT:
            self._interrupt(number)
            return number
        if self.asked is None:
            self.asked = number
            log.info(f"{number.name}: {self._notice}")
        return None

    def _interrupt(self, number: signal.Signals) -> None:
        """Raise Interrupted in the main thread."""
        self._is_patient = False
        _thread.interrupt_main(number)

    def _has_failed(self) -> bool:
        try:
            return bool(self._gone()) or self._told() is not None
        except (dist.DistError, RuntimeError):
            return False  # the store's host is busy, or gone: collectives will tell


def _state(process: psutil.Process) -> str | None:
    try:
        return str(process.status()) if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _find_interrupted(error: BaseException | None) -> Interrupted | None:
    """The signal behind an error: libraries may fail in their turn where one breaks into them."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _describe(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {_first_line(error)}. Its traceback is in the output of this rank."


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", text).rstrip(".")  # gloo says where in its source
