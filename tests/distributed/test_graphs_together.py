"""Ranks replay recorded micro-batches together or launch them together, whichever of them records or fails: on gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch

from qlora_fsdp.data.batch import Batch
from qlora_fsdp.runtime.cuda_graphs import NotRecorded
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from qlora_fsdp.training.capture import graphs as stage
from qlora_fsdp.training.capture.graphs import Graphs
from qlora_fsdp.training.capture.passes import Key
from tests.helpers.ranks import Meeting, once, run_ranks

pytestmark = pytest.mark.distributed
NUM_RANKS, NUM_BATCHES, LENGTH = 3, 40, 2048
REFUSED = "no memory, as asked"


class Case(NamedTuple):
    """Which recording fails on which rank, counted from 0, and how many micro-batches are taken before they run."""

    fails: tuple[int, int] | None = None
    num_taken: int = 1


CASES = {
    "all record": Case(),
    "steps of four that are seen first": Case(num_taken=4),
    **{f"recording {n} of rank {rank}": Case((rank, n)) for rank in range(NUM_RANKS) for n in range(3)},
    "steps of four, the second recording": Case((1, 1), num_taken=4),
}


class Seen(NamedTuple):
    """What a rank did: for each micro-batch the key of the graph that it got, or None, and the key that it needed."""

    replayed: list[Key | None]
    needed: list[Key]
    recorded: list[Key]
    num_late: int  # questions that were asked only when the answer was needed
    reason: str | None


def batches_of(rank: int) -> Iterator[Batch]:
    """Micro-batches of three sizes in all. At one time a size that is new comes twice in a row."""
    longest = np.random.default_rng(rank).choice([100, 300], NUM_BATCHES, p=[0.8, 0.2])
    longest[20 + rank : 22 + rank] = 1500
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    for length in longest.tolist():
        starts = torch.tensor([*range(0, LENGTH, length), LENGTH], dtype=torch.int32)
        yield Batch(ids, ids, ids, starts, max_row_length=length)


def run_case(case: Case, processes: Processes) -> Seen:
    """Get the graphs of all micro-batches, a step at a time; the ranks ask one another something else in between."""
    seen, num_started, start_sum = Seen([], [], [], 0, None), 0, Processes.start_sum

    def record(key: Key, batch: Batch) -> Any:
        if case.fails == (processes.rank, len(seen.recorded)):
            raise NotRecorded(REFUSED)
        seen.recorded.append(key)
        return SimpleNamespace(key=key, num_bytes=0)

    def count(self: Processes, values: list[float]) -> Callable[[], list[float]]:
        nonlocal num_started
        num_started += 1
        return start_sum(self, values)

    graphs, num_late = Graphs("Step", record, processes, is_sharded=True), 0
    with patch.object(Processes, "start_sum", count), patch.object(stage, "free_graphs", lambda: None):
        micro_batches = graphs.announced(batches_of(processes.rank))
        while step := list(islice(micro_batches, case.num_taken)):
            for batch in step:
                before = num_started
                graph = cast(Any, graphs.of(batch))
                num_late += num_started - before
                seen.replayed.append(graph and graph.key)
                seen.needed.append(Key.of(batch))
            assert processes.sum([1.0]) == [NUM_RANKS]
    return seen._replace(num_late=num_late, reason=graphs.reason)


def run_cases(cases: Mapping[str, Case]) -> dict[str, Seen]:
    Meeting.new_port()
    processes = start_processes(60)
    found = {name: run_case(case, processes) for name, case in cases.items()}
    stop_processes()
    return found


@pytest.fixture(scope="module")
def world() -> Callable[[], list[dict[str, Seen]]]:
    return once(lambda: run_ranks(NUM_RANKS, run_cases, CASES))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_graph_of_its_micro_batch_or_none_has_one(world, name: str):
    ranks = [found[name] for found in world()]
    for micro in range(NUM_BATCHES):
        assert [rank.replayed[micro] for rank in ranks] in ([rank.needed[micro] for rank in ranks], [None] * NUM_RANKS)
    fails = CASES[name].fails
    assert {rank.reason for rank in ranks} == {REFUSED if fails else None}
    for index, rank in enumerate(ranks):
        assert len(rank.replayed) == NUM_BATCHES and len(set(rank.recorded)) == len(rank.recorded)
        if fails is None:
            assert None not in rank.replayed and set(rank.recorded) == set(rank.needed) and len(rank.recorded) == 3
        else:
            assert rank.replayed[-1] is None
            assert index != fails[0] or len(rank.recorded) == fails[1]


def test_ranks_ask_ahead_once_they_have_graphs(world):
    for found in world():
        assert found["all record"].num_late == 2  # of the first, and of the one that was seen before it was recorded
        assert found["steps of four that are seen first"].num_late == 5
