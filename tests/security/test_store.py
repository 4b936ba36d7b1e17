"""What others than a run's ranks write to the store where the ranks met ends no run and reaches no terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

import psutil
import pytest

from qlora_fsdp.common.run_key import MAX_BYTES, MAX_TEXT, NODE_KEY, RUN_KEY, find_key, make_key, seal, unseal
from qlora_fsdp.runtime.heartbeats import UNKNOWN
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from qlora_fsdp.runtime.watch import Failure, Watch
from tests.helpers.ranks import Meeting, run_ranks

KEY = make_key()
FORGED = {**asdict(Failure(1, "all your GPUs \x1b[2J", 3)), "exit_code": 0}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setenv(NODE_KEY, KEY)
    yield start_processes(60, use_cpu=True)
    stop_processes()


def forgeries() -> list[str]:
    failure = Failure(1, "all your GPUs", 3)
    text = json.dumps(FORGED)
    return ["", "x", text, f" {text}", seal(failure, ""), seal(failure, make_key()), "\u00e9" * 70, "[" * 100_000]


@pytest.mark.parametrize("forged", forgeries())
def test_a_failure_of_nobody_is_not_told(processes: Processes, forged: str):
    watch = Watch(processes)
    try:
        watch.store.set("failure", forged)
        watch.store.set("beat/0", forged)
        assert watch._told() is None and watch.heartbeats.read() == [UNKNOWN]
        assert watch._tell("the disk is full", 2) == watch._told() == Failure(0, "the disk is full", 2)
    finally:
        watch.stop()


def test_a_message_has_the_fields_that_it_should(processes: Processes):
    good = Failure(1, "text", 3, True, [2])
    assert unseal(Failure, seal(good, KEY).encode(), KEY) == good
    for name, value in (("text", 3), ("rank", True), ("lost", ["1"]), ("lost", {}), ("exit_code", "3"), ("extra", 1)):
        forged = Failure(1, "text", 3)
        vars(forged)[name] = value
        assert unseal(Failure, seal(forged, KEY).encode(), KEY) is None
    long = unseal(Failure, seal(Failure(1, "x" * 10**6, 3), KEY).encode(), KEY)
    assert long is not None and len(long.text) == MAX_TEXT
    assert unseal(Failure, b" " * (MAX_BYTES + 1), KEY) is None


def test_without_a_secret_a_terminal_obeys_nothing_and_no_failure_ends_well(processes: Processes):
    """Ranks that torchrun starts have none, so others can end them; but not with a text that a terminal obeys."""
    watch = Watch(processes)
    try:
        watch._key = ""
        watch.store.set("failure", seal(Failure(1, "all your GPUs \x1b[2J", 0), ""))
        assert watch._told() == Failure(1, "all your GPUs ?[2J", 1)
    finally:
        watch.stop()


def test_ranks_of_several_nodes_use_no_secret_of_a_node():
    assert find_key({NODE_KEY: "a"}, is_one_node=True) == "a" and find_key({NODE_KEY: "a"}, is_one_node=False) == ""
    assert find_key({NODE_KEY: "a", RUN_KEY: "b"}, is_one_node=False) == "b" == find_key({RUN_KEY: "b"}, True)


def look_at_store(key: str) -> tuple[set[str], list[int], int]:
    """Where this rank listens once all have met, at how many ports as a store, and the number of ranks that met."""
    Meeting.new_port()
    os.environ[NODE_KEY] = key
    processes = start_processes(60, use_cpu=True)
    try:
        port, own = int(os.environ["MASTER_PORT"]), psutil.Process().net_connections("inet")
        listening = [each.laddr for each in own if each.status == psutil.CONN_LISTEN]
        served = [address.port for address in listening if address.port == port]
        total = int(processes.sum([1.0])[0])
        Watch(processes).finish()
        return {address.ip for address in listening}, served, total
    finally:
        stop_processes()


@pytest.mark.distributed
def test_ranks_of_one_host_are_reached_from_this_host_alone_and_leave_the_store():
    assert run_ranks(2, look_at_store, KEY) == [({"127.0.0.1"}, [], 2)] * 2
