"""How long steps take, told by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qlora_fsdp.training import step_recorder
from qlora_fsdp.training.step import StepFigures
from qlora_fsdp.training.step_recorder import StepRecorder


class Clock:
    """Stands in for `Moment`: the device's time, which the test moves on."""

    now = 0.0

    def __init__(self, device: torch.device) -> None:
        self.at = Clock.now

    def seconds_since(self, earlier: Clock) -> float:
        return self.at - earlier.at


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(step_recorder, "Moment", Clock)
    monkeypatch.setattr(Clock, "now", 0.0)
    return []


def make_recorder(lines: list[dict[str, Any]]) -> StepRecorder:
    journal = SimpleNamespace(step=lines.append)
    peaks = SimpleNamespace(record=lambda: None, peak_gib=lambda *phases: None)
    return StepRecorder(journal, peaks, SimpleNamespace(num_ranks=2, device=torch.device("cpu")))  # type: ignore[arg-type]


def run_step(recorder: StepRecorder, step: int, seconds: float, host_seconds: float = 0.0) -> None:
    """A step that the device computes in `seconds`; then the host is busy before it reads the figures."""
    recorder.begin_step()
    Clock.now += seconds
    recorder.queued_step()
    Clock.now += host_seconds
    recorder.write()
    batch = SimpleNamespace(step=step, epoch=0.5, num_tokens=800, num_targets=700, figures={})
    recorder.end_step(batch, StepFigures(2.0, 1.0), True, 1e-4, 0.0)  # type: ignore[arg-type]


def test_work_of_the_host_between_two_steps_belongs_to_the_later_one(lines: list[dict[str, Any]]) -> None:
    recorder = make_recorder(lines)
    run_step(recorder, 0, 4.0)
    run_step(recorder, 1, 1.0, host_seconds=3.0)  # the next step's graph is recorded
    run_step(recorder, 2, 1.0)
    recorder.write()
    assert [line["seconds"] for line in lines] == [4.0, 1.0, 4.0]
    assert [line["tokens_per_second_per_gpu"] for line in lines] == [100.0, 400.0, 100.0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert recorder.first_step_seconds == 4.0
    assert recorder.tokens_per_second_per_gpu == 250.0  # of the steps after the first


def test_an_evaluation_is_no_part_of_a_step_and_comes_after_the_line_of_the_step_before(
    lines: list[dict[str, Any]],
) -> None:
    recorder = make_recorder(lines)
    run_step(recorder, 0, 4.0)
    with recorder.paused():
        assert [line["step"] for line in lines] == [1]
        Clock.now += 60.0
    run_step(recorder, 1, 2.0)
    recorder.write()
    recorder.write()
    assert [line["seconds"] for line in lines] == [4.0, 2.0]
