"""Ends a run on all ranks when one of them fails, with one message that says which and why.

A main thread that waits in a collective runs no Python, so it notices neither a signal nor that another rank is gone.
Each rank therefore has two more threads. The first waits for signals, looks for ranks of this host that have ended, and
ends the run. The second exchanges messages with the other ranks through the store where the processes met, which needs
no collective. It is a thread of its own, because a call to a store whose process is stopped does not return. The store
has these keys:

    failure      the first failure of any rank; errors that it causes on other ranks are not written here
    shown        the failure has been printed and recorded
    lost/<rank>  this rank has lost contact with others, so it is not the one that is stuck
    beat/<rank>  where this rank is (heartbeats.py)

Slowness alone never ends a run. It ends only because a signal came, another rank failed, or another rank was lost.

A `Failure` is what ranks tell one another of why a run ends. `Neighbours` are the ranks' processes.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch.distributed as dist

from qlora_fsdp.common import threads
from qlora_fsdp.common.errors import Interrupted, RankError, StopNow, UserError, print_error
from qlora_fsdp.common.own_folder import leave_folder
from qlora_fsdp.common.run_key import seal, unseal
from qlora_fsdp.common.startup import is_orphan
from qlora_fsdp.common.text import first_line, printable_lines
from qlora_fsdp.runtime.heartbeats import Heartbeats, Unchanged
from qlora_fsdp.runtime.processes import Processes, stop_processes
from qlora_fsdp.runtime.signals import StopSignals

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # how long other ranks get to tell of their failure, or to print it
UNWIND_SECONDS = 5.0  # how long the main thread gets to notice by itself; torchrun kills 30 s after its SIGTERM
STOP_SECONDS = 5.0  # how long a call to the store gets to return
CLEAN_UP_SECONDS = 20.0  # how long it then gets to close what is open
OF_GLOO = ("gloo", "Application timeout caused pair closure")  # most errors begin with the place in its source


@contextmanager
def ending_together(watch: Watch | None) -> Iterator[None]:
    """A context for all that the ranks do once they have met. At its end they part, and an error on one ends all.

    Args:
        watch: tells the others of the error, and shows it once; None where no other rank is there to be told.
    """
    try:
        yield
        if watch is not None:
            watch.finish()
    except BaseException as error:
        reason = error if watch is None else watch.explain(error)
        if reason is error:
            raise
        raise reason from error
    finally:
        stop_processes()
        if watch is not None:
            watch.stop()


class Watch:
    """Ends this rank when a signal comes or another rank fails, from when it is made until `finish()` or `stop()`.

    Args:
        processes: all ranks take part in making their watches.
        record: called with the error that ends the run, on one rank alone: the lowest that is left.
        kept: called when a signal ends the run at once; it returns a sentence on what there is to resume from.
    """

    def __init__(
        self,
        processes: Processes,
        record: Callable[[BaseException], None] = lambda error: None,
        kept: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank = processes.rank
        self.num_ranks = processes.num_ranks
        self.timeout_seconds = processes.timeout_seconds
        self.record, self.kept = record, kept
        self._processes = processes
        # The watch has a connection of its own: calls on one connection wait for one another.
        self.store = processes.open_board("watch")
        self._key = processes.key
        self.heartbeats = Heartbeats(
            self.rank, self.num_ranks, processes.device, self.store, self.timeout_seconds, self._key
        )
        self.neighbours = Neighbours(processes)  # all ranks meet here, so each has written a beat
        self._unwinding = threading.Event()
        self._explained = threading.Event()
        self._explaining = threading.Lock()
        self._stopped = threading.Event()
        self._exit_code = 1
        self._is_told = False
        self._num_exchanges = 0
        self._is_rank_0_lost = False
        self._is_finishing = False
        self.signals = StopSignals()
        threading.Thread(target=self._work, name="watch", daemon=True).start()
        self._talking = threading.Thread(target=self._talk, name="heartbeats", daemon=True)
        if self.num_ranks > 1:
            self._talking.start()

    @property
    def asked(self) -> signal.Signals | None:
        """The signal that asked to stop since `be_patient()`."""
        return self.signals.asked

    def be_patient(self, notice: str) -> None:
        """From here on signals are only kept in `asked`, but for a second SIGINT. The first logs the `notice`."""
        self.signals.be_patient(notice)

    def finish(self) -> None:
        """Wait, however long, until the run is over on all ranks, and watch no more. Signals do nothing until `stop()`.

        Rank 0 may still write its report, and a rank that ended before would look lost to it.
        """
        self._is_finishing = True  # from here on a rank of this host may have ended because it has finished
        self._processes.wait(patiently=True)  # gloo raises an error here if a rank is killed before it has finished
        self.signals.stop_raising()
        self._end_threads()

    def stop(self) -> None:
        """Watch no more: the run is over on this rank."""
        self._end_threads()
        self.signals.restore()

    def _end_threads(self) -> None:
        self._stopped.set()
        if self._talking.is_alive():  # Python aborts if it ends while a thread returns from torch's store
            self._talking.join(STOP_SECONDS)

    def explain(self, error: BaseException) -> BaseException:
        """Find out what ended the run, given what was raised here.

        The other ranks are told, and one rank records and prints it.

        Returns:
            `error` itself if it is the first failure of any rank; otherwise a RankError that says which failure was.
        """
        self._unwinding.set()
        with self._explaining:  # a busy main thread may notice just as the first thread ends this process in its place
            return self._explain(error)

    def _explain(self, error: BaseException) -> BaseException:
        self.signals.stop_raising()
        if (interrupted := find_interrupted(error)) is not None:
            error = interrupted if interrupted.detail else Interrupted(interrupted.number, self.kept())
        has_store = True
        try:
            # In a thread of its own, because a call to a store whose process is stopped never returns.
            search = threads.begin_call(lambda: self._find_first(error), "first failure")
            first = search.result(0 if self._is_rank_0_lost else 2 * ANSWER_SECONDS)
        except (dist.DistError, RuntimeError, NotYet) as store_error:
            first, has_store = self._without_store(error, store_error), False
        if not first.is_of_others and (first.rank == self.rank or printable_lines(str(error)) == first.text):
            result = error
        else:
            result = RankError(first.text if first.is_of_others else f"rank {first.rank}: {first.text}")
            result.exit_code = first.exit_code
        if self._has_to_show(first, has_store):
            self.record(result)
            if isinstance(result, UserError):
                print_error(result)
            if has_store:
                with suppress(dist.DistError, RuntimeError):
                    self.store.set("shown", "")
        if isinstance(result, UserError):
            result.is_shown = True
        self._exit_code = getattr(result, "exit_code", 1)
        self._explained.set()
        return result

    def _find_first(self, error: BaseException) -> Failure:
        """Tell all ranks of this rank's error, or find the failure that it follows from."""
        if isinstance(error, Interrupted) or is_lost_contact(error):
            return self._find_cause(error)
        return self._tell(describe_error(error), getattr(error, "exit_code", 1))

    def _without_store(self, error: BaseException, store_error: BaseException) -> Failure:
        """Explain an error when the store can't be asked for the first failure."""
        is_rank_0_there = self.rank == 0
        mine = Failure(self.rank, describe_error(error), getattr(error, "exit_code", 1))
        is_own = not (isinstance(error, Interrupted) or is_lost_contact(error))
        if is_own and not isinstance(store_error, NotYet):  # who held the store may have ended by the same error
            return replace(mine, lost=[0] if self._processes.rank_0_holds_store and self.rank > 0 else [])
        if not isinstance(store_error, NotYet):
            what = f"its store can't be reached ({reason_of(store_error)})."
            text = f"rank 0 is gone: {what}"
            if not self._processes.rank_0_holds_store:  # the kernel has told the ranks of this host by a SIGTERM
                kept = error.detail if isinstance(error, Interrupted) else ""
                text = f"The launcher of the ranks was killed, perhaps for want of memory: {what} {kept}".strip()
                is_rank_0_there |= self._processes.num_ranks == self._processes.local_num_ranks
        elif self._processes.rank_0_holds_store:
            text = f"rank 0 does not answer: {self.neighbours.describe(0)} holds the store of the run, which is silent."
        elif is_lost_contact(error):
            text = f"The ranks lost contact with one another: {reason_of(error)}."
        else:
            return mine
        return Failure(self.rank, text, RankError.exit_code, is_of_others=True, lost=[] if is_rank_0_there else [0])

    def _tell(self, text: str, exit_code: int, is_of_others: bool = False, lost: list[int] | None = None) -> Failure:
        """Tell all ranks of a failure; returns the failure that was told first."""
        mine = Failure(self.rank, text, exit_code, is_of_others, lost or [])
        sealed = seal(mine, self._key)
        told = self._read_failure(self.store.compare_set("failure", "", sealed))
        if told is None:  # somebody else has written there
            self.store.set("failure", sealed)
        return told or mine

    def _told(self) -> Failure | None:
        return self._read_failure(self.store.get("failure")) if self.store.check(["failure"]) else None

    def _read_failure(self, stored: bytes) -> Failure | None:
        failure = unseal(Failure, stored, self._key)
        if failure is None:
            return None
        exit_code = failure.exit_code if 0 < failure.exit_code < 256 else 1
        return replace(failure, text=printable_lines(failure.text), exit_code=exit_code)

    def _find_cause(self, error: BaseException) -> Failure:
        """Find the failure or the end of another rank that is behind a signal or a lost connection."""
        self.store.set(f"lost/{self.rank}", "")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if (told := self._told()) is not None:
                return told
            if gone := self.neighbours.gone():
                what = "ended without a word. It was killed, perhaps for want of memory"
                return self._tell_of(dict.fromkeys(gone, what), "is gone")
            if isinstance(error, Interrupted) and is_orphan():
                text = f"The launcher of the ranks was killed, perhaps for want of memory. {error.detail}".strip()
                return self._tell(text, RankError.exit_code, is_of_others=True)
            if isinstance(error, Interrupted):
                return self._tell(str(error), error.exit_code)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        silent = [rank for rank in range(self.num_ranks) if not self.store.check([f"lost/{rank}"])]
        if silent:
            beats, what = self.heartbeats.read(), f"was waited for: {reason_of(error)}"
            return self._tell_of({rank: f"{what}. It is {beats[rank].place}" for rank in silent}, "does not answer")
        text = f"The ranks lost contact with one another: {reason_of(error)}."
        return self._tell(text, RankError.exit_code, is_of_others=True)

    def _tell_of(self, ranks: dict[int, str], verdict: str) -> Failure:
        """Tell of lost ranks; for each, `ranks` has the end of a sentence about its process."""
        lines = [f"rank {rank} {verdict}: {self.neighbours.describe(rank)} {what}." for rank, what in ranks.items()]
        return self._tell("\n".join(lines), RankError.exit_code, is_of_others=True, lost=list(ranks))

    def _has_to_show(self, first: Failure, has_store: bool) -> bool:
        """Whether this rank has to print and record the failure.

        The lowest rank that is left does. If it has not done so in time, any other may.
        """
        # Without the store, a rank that has ended counts as left: it may have printed the failure before.
        gone = {*first.lost, *(self.neighbours.gone() if has_store else [])}
        is_lowest_left = self.rank == min((rank for rank in range(self.num_ranks) if rank not in gone), default=None)
        if not has_store:
            return is_lowest_left
        deadline = time.monotonic() + (0 if is_lowest_left else ANSWER_SECONDS)
        with suppress(dist.DistError, RuntimeError):
            while not self.store.check(["shown"]):
                if time.monotonic() >= deadline:
                    return True
                time.sleep(0.1)
            return False
        return True

    def _work(self) -> None:
        """The first thread: wait for a reason to end the run, and end it."""
        exchanges = Unchanged(longest_look=2 * POLL_SECONDS)
        while True:
            number = self.signals.wait(POLL_SECONDS)
            if self._stopped.is_set():
                return
            if number is None and self._must_end(exchanges):
                number = self.signals.asked or signal.SIGTERM  # all ranks tell of a signal that they all got
                self.signals.interrupt(number)
            if number is not None:
                self._end(number)
                return

    def _must_end(self, exchanges: Unchanged) -> bool:
        """Whether another rank has told of a failure, is silent, or is gone."""
        silence = exchanges.look(self._num_exchanges, time.monotonic())
        is_silent = self.num_ranks > 1 and silence > self.timeout_seconds
        self._is_rank_0_lost = is_silent and self._processes.rank_0_holds_store and self.rank > 0
        is_gone = bool(self.neighbours.gone()) and not self._is_finishing
        return self._is_told or self._is_rank_0_lost or is_gone

    def _end(self, number: signal.Signals) -> None:
        """Give the main thread time to end this process; if it does not, because it waits in C, end it from here."""
        if self._unwinding.wait(UNWIND_SECONDS):
            self._explained.wait(4 * ANSWER_SECONDS)
            if self._stopped.wait(CLEAN_UP_SECONDS):
                return
        else:
            self.explain(Interrupted(number))
        sys.stdout.flush()
        leave_folder()
        os._exit(self._exit_code)

    def _talk(self) -> None:
        """The second thread: hear what others tell, exchange beats, and tell of lost ranks."""
        while not self._stopped.wait(min(POLL_SECONDS, self.heartbeats.interval)):
            with suppress(dist.DistError, RuntimeError):  # the store's host is busy or gone
                self._is_told = self._told() is not None
                self._num_exchanges += 1
            with suppress(Exception):  # nothing that goes wrong here may end a healthy run
                if lost := self.heartbeats.exchange(self.neighbours.cpu_seconds):
                    self._tell_of(lost, "does not answer")


@dataclass(frozen=True)
class Failure:
    """The reason why a run ends.

    Attributes:
        rank: the rank that tells of it.
        text: the message.
        exit_code: the exit code of every rank.
        is_of_others: whether the message is about other ranks, which could not tell of it themselves.
        lost: ranks that are not there to print the message.
    """

    rank: int
    text: str
    exit_code: int
    is_of_others: bool = False
    lost: list[int] = field(default_factory=list)


def find_interrupted(error: BaseException | None) -> Interrupted | StopNow | None:
    """The signal behind an error, if any: a library that a signal interrupts may raise an error of its own."""
    while error is not None and not isinstance(error, Interrupted | StopNow):
        error = error.__cause__ or error.__context__
    return error


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late."""
    text = str(error)
    is_of_gloo = isinstance(error, RuntimeError) and any(mark in text for mark in OF_GLOO)
    return (isinstance(error, dist.DistError) or is_of_gloo) and os.strerror(errno.EMFILE) not in text


def describe_error(error: BaseException) -> str:
    """The message of an error for the other ranks."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {reason_of(error)}. Its traceback is in the output of this rank."


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, without gloo's place in its source."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first_line(error)).rstrip(".")


class Neighbours:
    """Where each rank's process runs; those of this host can be looked at. All ranks take part in making it."""

    def __init__(self, processes: Processes) -> None:
        host = (platform.node(), Path("/proc/self/ns/pid").stat().st_ino)  # ids of processes hold in one namespace
        self._places = processes.gather((host, os.getpid()), tuple[tuple[str, int], int])
        self._here = {
            rank: psutil.Process(pid)
            for rank, (where, pid) in enumerate(self._places)
            if where == host and rank != processes.rank
        }

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended."""
        return [rank for rank, process in self._here.items() if _state(process) in (None, psutil.STATUS_ZOMBIE)]

    def describe(self, rank: int) -> str:
        """A rank's process for a message: its id, its host, and its state where that can be seen."""
        (host, _), pid = self._places[rank]
        state = _state(self._here[rank]) if rank in self._here else None
        return f"process {pid} on {host}" + ("" if state in (None, psutil.STATUS_ZOMBIE) else f" (it is {state})")

    def cpu_seconds(self) -> list[float]:
        """Processor time of each rank's process, by rank; 0 for this rank and those of other hosts."""
        return [_cpu_seconds(self._here[rank]) if rank in self._here else 0.0 for rank in range(len(self._places))]


def _state(process: psutil.Process) -> str | None:
    try:
        return str(process.status()) if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0
