"""A signal ends what it breaks off: nobody takes it for a failure of that, and goes on without."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from qlora_fsdp.common.errors import StopNow
from qlora_fsdp.runtime.processes import start_processes, stop_processes
from qlora_fsdp.runtime.signals import StopSignals
from qlora_fsdp.runtime.watch import find_interrupted


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    taken_over = StopSignals()
    yield taken_over
    taken_over.restore()


def test_what_catches_every_exception_lets_it_through(signals: StopSignals) -> None:
    """As a trial of a model does, after which rows would be padded, and the render of a chat template."""
    with pytest.raises(StopNow) as caught, suppress(Exception):
        signal.raise_signal(signal.SIGTERM)
    found = find_interrupted(caught.value)
    assert found is caught.value and found.number == signal.SIGTERM


def test_it_is_found_behind_an_error_of_a_library(signals: StopSignals) -> None:
    with pytest.raises(ValueError) as caught:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ValueError("a library's own") from error
    found = find_interrupted(caught.value)
    assert found is not None and found.number == signal.SIGINT


def test_many_ranks_leave_high_file_numbers_to_the_signals() -> None:
    """Every rank is connected to every other one, several times. Beyond 1,024 files the watch of signals once ended."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 1200:
        pytest.skip("so many files can't be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        stack.callback(stop_processes)
        start_processes(60, use_cpu=True)
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        signals = StopSignals()
        stack.callback(signals.restore)
        with pytest.raises(StopNow):
            signal.raise_signal(signal.SIGTERM)
        assert signals.wait(60) == signal.SIGTERM
