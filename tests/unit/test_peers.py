"""Memory that GPUs of a host read from one another: whether they can, and rows of tables that are read there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qlora_fsdp.runtime.peers import PeerPlace, PeerTable, can_read_peers, start_copies


def ask(monkeypatch: pytest.MonkeyPatch, links: set[tuple[int, int]], seen: int = 3, others: bool = True) -> bool:
    """What rank 1 of three finds out; `others`: what the other ranks have found out."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own.index, other) in links)
    processes: Any = SimpleNamespace(
        device=torch.device("cuda", 1), local_num_ranks=3, gather=lambda can, kind: [others, can, others]
    )
    return can_read_peers(processes)


def test_every_rank_must_read_every_gpu_of_its_host(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    links = {(1, 0), (1, 2)}
    assert ask(monkeypatch, links)
    assert not ask(monkeypatch, {(1, 0)})
    assert not ask(monkeypatch, links, others=False)
    assert not ask(monkeypatch, links, seen=1)  # each process sees its own GPU alone


@pytest.mark.parametrize(("value", "can"), [("1", False), ("0", True)])
def test_the_variable_that_keeps_nccl_from_reading_keeps_us_too(monkeypatch, value: str, can: bool):
    monkeypatch.setenv("NCCL_P2P_DISABLE", value)
    assert ask(monkeypatch, {(1, 0), (1, 2)}) is can


def test_a_cpu_reads_nothing():
    processes: Any = SimpleNamespace(device=torch.device("cpu"), local_num_ranks=2, gather=lambda can, kind: [can, can])
    assert not can_read_peers(processes)


@pytest.mark.parametrize("shape", [(12, 5), (12,)])
def test_rows_of_a_table_are_those_of_all_ranks_together(shape: tuple[int, ...]):
    whole = torch.randint(0, 2**16, shape).to(torch.uint16).view(torch.bfloat16)  # NaN among them, as codes may be
    table, index = PeerTable(whole.split(4)), torch.tensor([11, 0, 3, 4, 4, 7, 8])
    assert torch.equal(table.look_up(index).view(torch.int16), whole[index].view(torch.int16))
    assert torch.equal(table.slice(2, 9).view(torch.int16), whole[2:9].view(torch.int16))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("is_whole", [True, False])
def test_copies_put_the_rows_of_all_ranks_together(rank: int, is_whole: bool):
    expected = torch.arange(12, dtype=torch.uint8)
    parts = list(expected.split(4))
    whole = torch.zeros(12, dtype=torch.uint8)
    if is_whole:  # its own rows are there
        parts[rank] = whole[4 * rank : 4 * rank + 4].copy_(parts[rank])
    copies = PeerPlace(parts, rank, whole if is_whole else None).copies_to(whole)
    assert len(copies) == (2 if is_whole else 3)
    start_copies(copies, torch.device("cpu"))
    assert torch.equal(whole, expected)
