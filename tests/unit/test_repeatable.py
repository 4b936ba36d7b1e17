"""`training.deterministic`: what the libraries are told, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch
from tests.helpers.quick_config import load_config
from torch.utils import deterministic

from qlora_fsdp.common.errors import ConfigError
from qlora_fsdp.config.checks.check_launch import check_launch_environment
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.training.capture.passes import Key, with_room
from qlora_fsdp.training.run import VARIABLES, repeatable

RUN = ["model=tiny", "data=random", "training.max_steps=1", "training.deterministic=true"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in VARIABLES:
        os.environ.pop(name, None)


def test_libraries_are_told_for_the_time_of_a_run():
    with repeatable(wanted=True):
        assert (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        assert not deterministic.fill_uninitialized_memory  # it would write every new tensor once more
        assert {name: os.environ[name] for name in VARIABLES} == VARIABLES
    assert not torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory


def test_a_run_that_need_not_repeat_is_left_alone():
    with repeatable(wanted=False):
        assert not torch.are_deterministic_algorithms_enabled() and not VARIABLES.keys() & os.environ.keys()


def test_what_the_user_has_set_stays():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    with repeatable(wanted=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_an_operation_without_a_deterministic_kernel_is_named():
    message = r"training\.deterministic=true .* no deterministic kernel for put_,"
    with pytest.raises(ConfigError, match=message), repeatable(wanted=True):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of the two stays?
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes") as found, repeatable(wanted=True):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not isinstance(found.value, ConfigError)


def test_a_workspace_of_cublas_that_lets_it_add_in_any_order_is_refused():
    variable = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    (problem,) = check_launch_environment(load_config(RUN), variable)
    assert problem.what == "CUBLAS_WORKSPACE_CONFIG=:0:0"
    assert check_launch_environment(load_config([*RUN, "training.deterministic=false"]), variable) == []
    assert check_launch_environment(load_config(RUN), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == []


def test_launched_micro_batches_have_the_room_of_recorded_ones():
    ids = torch.arange(512).view(2, 256)
    batch = Batch(ids, ids, ids, torch.tensor([0, 100, 256, 512], dtype=torch.int32), max_row_length=256)
    roomy = with_room(batch, Key.of(batch), torch.device("cpu"))
    assert roomy.sequence_starts.tolist() == [0, 100, 256, 512] + [512] * 13
    assert roomy.max_row_length == 256 and torch.equal(roomy.input_ids, ids)
