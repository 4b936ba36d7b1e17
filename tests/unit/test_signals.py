"""A signal ends what it breaks off: nobody takes it for a failure of that, and goes on without."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from qlora_fsdp.common.errors import StopNow
from qlora_fsdp.runtime.failures import find_interrupted
from qlora_fsdp.runtime.signals import StopSignals


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
