"""Which gradient norms are spikes, and the end of a run that is past saving. The ranks' part: tests/distributed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.config.schema import OnBadStep
from qlora_fsdp.config.specs import StepSpec
from qlora_fsdp.data.sequences import RandomRows, SequenceSettings, make_sequences
from qlora_fsdp.data.split import BatchSplit
from qlora_fsdp.training.bad_steps import MAX_IN_A_ROW, BadSteps
from qlora_fsdp.training.checkpoints.saver import Saved

NORMS = [1.0 + 0.01 * i for i in range(20)]


def judge(folder: Path, norms: list[float], **settings: Any) -> BadSteps:
    rows = RandomRows(8, 4, 10, 0)
    data = make_sequences(rows, np.arange(8), SequenceSettings(4, 0, packing=False, seed=0))
    processes: Any = SimpleNamespace(
        rank=0, is_main=True, gather=lambda value, kind: [value], share=lambda value, kind: value
    )
    saver: Any = SimpleNamespace(save=lambda step: Saved(True, f"Step {step} is saved."), restore=lambda: None)
    return BadSteps(StepSpec(2, 2, **settings), folder, data, BatchSplit(2, 2, 1, 4, 8), str, norms, saver, processes)


def check(bad_steps: BadSteps, loss: float, norm: float) -> bool:
    return bad_steps.check(30, loss, norm, np.arange(2), [torch.tensor(loss)])


@pytest.mark.parametrize(
    ("norms", "norm", "is_good"),
    [(NORMS, 5.4, True), (NORMS, 5.6, False), (NORMS[:19], 99.0, True), (NORMS, float("inf"), False)],
)
def test_spike_is_told_from_the_usual(tmp_path: Path, norms: list[float], norm: float, is_good: bool):
    bad_steps = judge(tmp_path, norms, on_bad_step=OnBadStep.skip, grad_norm_spike=5.0)
    assert check(bad_steps, 1.0, norm) is is_good
    assert (tmp_path / "bad_steps" / "step-00000031.json").exists() is not is_good
    assert (norm in bad_steps.norms) is is_good, "a spike does not become usual"


def test_without_the_setting_no_norm_is_a_spike(tmp_path: Path):
    assert check(judge(tmp_path, NORMS, on_bad_step=OnBadStep.skip), 1.0, 1e9)


@pytest.mark.parametrize("policy", [OnBadStep.skip, OnBadStep.rollback])
def test_many_bad_steps_in_a_row_end_the_run(tmp_path: Path, policy: OnBadStep):
    bad_steps = judge(tmp_path, [], on_bad_step=policy)
    for _ in range(MAX_IN_A_ROW):
        assert not check(bad_steps, float("nan"), 1.0)
    with pytest.raises(TrainingError, match=r"These were 11 in a row\. Step 30 is saved"):
        check(bad_steps, float("nan"), 1.0)
