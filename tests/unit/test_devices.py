"""Hardware that can't run what was asked for, as torch would report it."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented there, not exported

from qlora_fsdp.common.errors import DeviceError
from qlora_fsdp.config.schema import Dtype
from qlora_fsdp.runtime import processes
from qlora_fsdp.runtime.hardware import choose_dtype
from qlora_fsdp.runtime.processes import start_processes


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(DeviceError, match=r"4 processes .* 2 GPUs.* Start at most 2 a node"):
        start_processes(timeout_seconds=5)


def test_ranks_without_their_place_on_the_node_are_all_of_one_node(monkeypatch: pytest.MonkeyPatch):
    """As a launcher of one's own may start them, with RANK and WORLD_SIZE alone: each takes its own GPU."""

    def take(index: int) -> None:
        raise LookupError(index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(processes, "open_store", lambda *args: HashStore())
    monkeypatch.setattr(processes, "count_ranks_here", lambda store, rank, num_ranks: num_ranks)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LookupError, match="1"):
        start_processes(timeout_seconds=5)


@pytest.mark.parametrize(("own", "used"), [(None, "0"), ("1", "1")])
def test_nccl_registers_no_tensors_of_graphs(monkeypatch: pytest.MonkeyPatch, own: str | None, used: str):
    """NCCL reads that with its first communicator. A rank whose tensors lie otherwise would wait forever."""

    def meet(*args: object, **kwargs: object) -> None:
        raise LookupError(os.environ["NCCL_GRAPH_REGISTER"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setattr(processes.dist, "init_process_group", meet)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", own or "")
    if own is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    with pytest.raises(LookupError, match=used):
        start_processes(timeout_seconds=5)


def test_bfloat16_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DeviceError, match=r"training.precision=bfloat16 .* Tesla T4 has no bfloat16"):
        choose_dtype(Dtype.bfloat16, torch.device("cuda"))
    assert choose_dtype(Dtype.auto, torch.device("cuda")) is torch.float32
