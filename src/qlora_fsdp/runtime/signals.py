"""The signals that ask a run to stop: SIGINT (Ctrl-C), SIGTERM and SIGUSR1 (from a batch system).

Python runs a signal handler in the main thread, between two of its instructions. A main thread that waits inside a C
function, for example in a collective, therefore does not notice a signal. So each signal is also written to a pipe, by
`signal.set_wakeup_fd`, and another thread can read it there.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import signal
import time
from types import FrameType

from qlora_fsdp.common.errors import StopNow

log = logging.getLogger("qlora_fsdp")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# What comes this soon after the first signal is the same one: `scancel --signal=INT` sends it to every process of a
# job, and the command above the ranks passes on to them what it gets.
ECHO_SECONDS = 2.0


class StopSignals:
    """Takes the signals of this process over, until `restore()`.

    At first, a signal raises `StopNow` in the main thread. After `be_patient()`, a signal is only kept in `asked`,
    so that training can stop at the end of a step, and a second SIGINT raises, unless it is an echo of the first.

    Attributes:
        asked: the first signal since `be_patient()`.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._is_patient, self._notice = False, ""
        self._has_raised, self._asked_at = False, 0.0
        self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._arrivals = select.poll()  # select() takes no file number over 1023, and some hundred ranks open as many
        self._arrivals.register(self._read_end, select.POLLIN)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def be_patient(self, notice: str) -> None:
        """From here on only a second SIGINT ends the run at once. With the first signal the `notice` is logged."""
        self._is_patient, self._notice = True, notice

    def wait(self, seconds: float) -> signal.Signals | None:
        """Wait for a signal, on a thread beside the main one; the signal if it ends the run at once."""
        if not self._arrivals.poll(seconds * 1000):
            return None
        number = os.read(self._read_end, 1)[0]
        return self._judge(signal.Signals(number)) if number in SIGNALS else None  # others are a library's: SIGCHLD

    def interrupt(self, number: signal.Signals) -> None:
        """Raise `StopNow` in the main thread, patient or not."""
        self._is_patient = False
        _thread.interrupt_main(number)

    def stop_raising(self) -> None:
        """From here on no signal raises: another exception would break off the cleaning up."""
        self._is_patient, self._has_raised = False, True

    def restore(self) -> None:
        """Give the signals back to the handlers that were there before."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    def _leave_to_parent(self) -> None:
        """Called in a forked worker process. A terminal sends Ctrl-C to workers too, but this process ends them."""
        self.restore()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_patient and not self._has_raised:
            self._has_raised = True
            raise StopNow(number)

    def _judge(self, number: signal.Signals) -> signal.Signals | None:
        if not self._is_patient:
            return number
        if self.asked is not None and number == signal.SIGINT and time.monotonic() - self._asked_at > ECHO_SECONDS:
            self.interrupt(number)
            return number
        if self.asked is None:
            self.asked, self._asked_at = number, time.monotonic()
            log.info(f"{number.name}: {self._notice}")
        return None
