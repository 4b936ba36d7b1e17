"""Steps and evaluations whose graphs stand for launched kernels: what ranks gather, free and add up, without a GPU.

A graph of these tests launches what was recorded, each time that it is replayed. So gathers and sums run as in a graph,
and ranks that disagree about them wait for one another until the time is up.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from qlora_fsdp.common.errors import TrainingError
from qlora_fsdp.config.schema import ProblemType
from qlora_fsdp.data.batch import Batch
from qlora_fsdp.layers.quantized.weight_reader import WeightReader
from qlora_fsdp.runtime.cuda_graphs import NotRecorded
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.training import train_adapter
from qlora_fsdp.training.capture import captured, graphs
from qlora_fsdp.training.capture.passes import EagerPasses, Key, fill, with_room
from qlora_fsdp.training.prepare import Prepared
from tests.helpers.classification import LABELS, WORD_LABELS, write_labelled_rows, write_labelled_words
from tests.helpers.preferences import write_pairs
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import Trained, settings, train_all, train_here

pytestmark = pytest.mark.distributed
NUM_RANKS = 2
RUN = ["training.max_steps=9", "training.micro_batch_size=2", "training.global_batch_size=4"]
EVALUATED = ["data.eval_fraction=0.1", "training.eval_every_steps=4", "training.deterministic=true"]
LONG = ["training.max_length=256"]  # then ranks need several graphs, which come at different times
HELD = ["fsdp=no_shard", "memory.keep_dequantized=run"]
PAIRS = [*LONG, "task=preference", "data.path=PAIRS"]
PADDED = [*LONG, "training.packing=false"]


class Case(NamedTuple):
    """The settings of a run, which recording fails on which rank, and what the log says then."""

    settings: list[str]
    fails: tuple[int, int] | None = None
    name: str = ""


CASES = {
    "rows of many lengths": Case(LONG),
    "SHARD_GRAD_OP": Case(["fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "accumulation": Case([*LONG, "training.global_batch_size=16"]),
    "weights kept for the run": Case([*LONG, *HELD]),
    "weights kept for the run, and the second graph of a step fails": Case([*LONG, *HELD], (0, 1), "Step"),
    "kto, which looks ahead": Case([*PAIRS, "preference.loss=kto"]),
    "dpo with the reference in the step": Case([*PAIRS, "preference.precompute=false"]),
    "padded": Case(PADDED),
    "dpo, padded": Case([*PAIRS, "training.packing=false"]),
    "kto, padded": Case([*PAIRS, "preference.loss=kto", "training.packing=false"]),
    "dpo, padded, with the reference in the step": Case(
        [*PAIRS, "training.packing=false", "preference.precompute=false"]
    ),
    "reward": Case(["task=reward", *PAIRS[:1], *PAIRS[2:], "training.packing=false"]),
    "labels of rows": Case(
        [
            "training.packing=false",
            "task=sequence_classification",
            f"task.labels=[{','.join(LABELS)}]",
            "data.path=LABELLED",
        ]
    ),
    "labels of words": Case(
        [
            "training.packing=false",
            "task=token_classification",
            f"task.labels=[{','.join(WORD_LABELS)}]",
            "data.path=WORDS",
        ]
    ),
    "the second graph of a step fails": Case(LONG, (1, 1), "Step"),
    "the graph of an evaluation fails": Case([], (0, 1), "Evaluation"),
}


def train_replaying(cases: Mapping[str, tuple[Sequence[str], tuple[int, int] | None]]) -> dict[str, Trained]:
    """Runs whose micro-batches are recorded and replayed as far as that can be done without CUDA."""
    return {name: _train(argv, fails) for name, (argv, fails) in cases.items()}


def _train(argv: Sequence[str], fails: tuple[int, int] | None, is_required: bool = False) -> Trained:
    num_recorded, readers, held = 0, list[WeightReader](), list[int]()

    class Launched(EagerPasses):
        """Passes that are launched: no memory may be held then for graphs to read."""

        def run(self, batch: Batch, is_last: bool) -> Tensor:
            assert not readers[-1].held
            return super().run(batch, is_last)

    def record(passes: captured.CapturedPasses, compute: Callable[[Batch], Tensor], key: Key, batch: Batch) -> Any:
        nonlocal num_recorded
        batch = with_room(batch, key, passes.device)
        if fails == (int(os.environ["RANK"]), num_recorded):
            raise NotRecorded("as asked")
        num_recorded += 1
        has_backward = torch.is_grad_enabled()

        def run(given: Batch) -> Tensor:
            fill(batch, given)
            with torch.set_grad_enabled(has_backward):
                return compute(batch)

        held.append(len(readers[-1].held))
        return SimpleNamespace(run=run, num_bytes=0, graph=SimpleNamespace(reset=lambda: None))

    def make(prepared: Prepared, trainable: Sequence[nn.Parameter], processes: Processes) -> Any:
        eager = Launched(prepared.model, processes.device, prepared.peaks, prepared.spec.steps.deterministic)
        holds = prepared.spec.recorded["memory.keep_dequantized"] == "run"
        readers.append(WeightReader(prepared.model, processes.device, prepared.model.layers[1:], holds))
        return captured.CapturedPasses(eager, trainable, processes, prepared.peaks, math.inf, readers[-1], is_required)

    with ExitStack() as stack:
        for module, name, value in (
            (train_adapter, "make_passes", make),
            (captured.CapturedPasses, "_record", record),
            (graphs, "free_graphs", lambda: None),
            (captured.CapturedPasses, "_missing_bytes", lambda self: float("-inf")),
            (torch.cuda, "graph_pool_handle", lambda: None),
            (torch.cuda, "get_sync_debug_mode", lambda: 0),
            (torch.cuda, "set_sync_debug_mode", lambda mode: None),
        ):
            stack.enter_context(patch.object(module, name, value))
        trained = train_here(argv)
        assert all(number == 7 * readers[-1].holds for number in held) and not readers[-1].held
        return trained


def fail_replaying(argv: Sequence[str]) -> str:
    """The error of a run in which rank 0 can't record, though it is to."""
    with pytest.raises(TrainingError) as raised:
        _train(argv, (0, 0), is_required=True)
    return str(raised.value)


@pytest.fixture(scope="module")
def folder(rows: Path) -> Path:
    return rows.parent / "replayed"


@pytest.fixture(scope="module")
def worlds(checkpoint: Callable[..., Path], rows: Path, folder: Path) -> Sequence[Callable[[], Any]]:
    """The runs that replay and those that launch."""
    labelled = write_labelled_rows(rows.parent / "labelled.jsonl", ProblemType.single_label_classification, 100)
    files = {
        "PAIRS": write_pairs(rows.parent / "replayed pairs.jsonl", 300),
        "LABELLED": labelled,
        "WORDS": write_labelled_words(rows.parent / "words.jsonl", 100),
    }

    def argv(name: str, mode: str) -> list[str]:
        own = list(CASES[name].settings)
        for word, file in files.items():
            own = [text.replace(f"data.path={word}", f"data.path={str(file)!r}") for text in own]
        return settings(checkpoint("llama"), rows, *RUN, *EVALUATED, *own, f"run.folder='{folder / mode / name}'")

    replaying = {name: (argv(name, "replayed"), case.fails) for name, case in CASES.items()}
    launching = {name: argv(name, "launched") for name in CASES}
    return (
        once(lambda: run_ranks(NUM_RANKS, train_replaying, replaying)),
        once(lambda: run_ranks(NUM_RANKS, train_all, launching)),
    )


@pytest.mark.parametrize("name", CASES)
def test_steps_and_evaluations_are_those_of_launched_kernels(worlds, folder: Path, name: str):
    replayed, launched = (world()[0][name] for world in worlds)
    assert len(launched.losses) == 9 and replayed.losses == pytest.approx(launched.losses, rel=1e-5)
    found = []
    for mode in ("replayed", "launched"):
        lines = map(json.loads, (folder / mode / name / "metrics.jsonl").read_text().splitlines())
        found.append([line["eval_loss"] for line in lines if "eval_loss" in line])
    assert len(found[1]) == 4 and found[0] == pytest.approx(found[1], rel=1e-5)
    log, fails = (folder / "replayed" / name / "train.log").read_text(), CASES[name].name
    assert "Step: recorded as a CUDA graph for" in log
    assert ("Evaluation: recorded as a CUDA graph for" in log) is (not fails and "labels" not in name), log
    assert log.count("no CUDA graph could be recorded") == log.count(f"{fails}: no CUDA graph could be") == bool(fails)


def test_a_run_that_is_to_record_ends_where_one_rank_cannot(checkpoint, rows: Path, tmp_path: Path):
    argv = settings(checkpoint("llama"), rows, *RUN, f"run.folder={tmp_path / 'run'}")
    expected = "compute.cuda_graph=true, and steps can't be recorded as CUDA graphs here: as asked. Set compute.cuda_gr"
    assert all(error.startswith(expected) for error in run_ranks(NUM_RANKS, fail_replaying, argv))
