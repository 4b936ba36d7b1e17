"""The watch, in a process of its own: signals that are none of its concern."""

from __future__ import annotations

import os
import signal
import time

import pytest

from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.runtime.watch import Watch
from tests.helpers.ranks import Meeting, run_ranks

pytestmark = pytest.mark.distributed


def catch_another_signal() -> tuple[list[int], signal.Signals | None, signal.Signals | None]:
    """What a library's handler saw, and what the watch was asked by that and then by SIGTERM."""
    Meeting.new_port()
    watch, seen = Watch(start_processes(60)), list[int]()
    watch.be_patient("the run stops")
    signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGCHLD)
    time.sleep(0.5)
    before = watch.asked
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    watch.stop()
    stop_processes()
    return seen, before, watch.asked


def test_a_signal_that_a_library_handles_ends_no_run() -> None:
    assert run_ranks(1, catch_another_signal) == [([signal.SIGCHLD], None, signal.SIGTERM)]
