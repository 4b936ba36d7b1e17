"""Frozen weights that ranks read from one another's memory (`sharding/peer_weights.py`): runs are the same to the bit.

On GPUs that memory is CUDA's (tests/gpu/test_gpu_peer_codes.py). Here files that all ranks map stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.common.errors import ProofError
from qlora_fsdp.model.tasks.task_model import TaskModel
from qlora_fsdp.records.run_state import LOG_FILE
from qlora_fsdp.runtime.peers import PeerTable
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding import peer_weights
from qlora_fsdp.sharding.peer_weights import PeerWeights
from tests.helpers.peers import BothWays, assert_same, make_layers, mapped_files, train_both_ways
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import settings, train_here

pytestmark = pytest.mark.distributed
# By case: settings, the sets of buffers that there are then, and the parameters of the embeddings.
KINDS: dict[str, tuple[list[str], int, int]] = {
    "FULL_SHARD": ([], 2, 1),
    "SHARD_GRAD_OP": (["fsdp.sharding_strategy=SHARD_GRAD_OP"], 4, 1),
    "recomputed": (["memory=recompute"], 2, 1),
    "int8": (["quant=int8"], 2, 1),
    "int8 embeddings": (["quant.embeddings=int8", "fsdp.reshard_after_forward=false"], 4, 2),
}


@pytest.fixture(scope="module")
def argv(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    model = make_layers(tmp_path_factory.mktemp("model"), num_layers=4)
    own = ["training.max_steps=3", "data.eval_fraction=0.02", "training.eval_every_steps=1"]
    return lambda *more: settings(model, rows, *own, *more)


@pytest.fixture(scope="module")
def runs(argv, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, BothWays]]]:
    cases = {kind: argv(*more) for kind, (more, *_) in KINDS.items()}
    return once(lambda: run_ranks(2, train_both_ways, cases, tmp_path_factory.mktemp("memory")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_to_the_bit(runs, kind: str):
    for found in runs():
        assert_same(found[kind], num_steps=3)
        assert found[kind].num_codes == 4 * 7
        assert (found[kind].num_buffers, found[kind].num_tables) == (KINDS[kind][1] * 7, KINDS[kind][2])
        assert found[kind].holds_head == (kind == "SHARD_GRAD_OP")  # layers stay gathered, and the head is not in int8


def test_three_ranks_read_what_splits_into_equal_parts(argv, tmp_path: Path):
    """Hidden states of 64 do not: those weights are gathered. The MLP's 192 do, gate and up, and 264 tokens."""
    for found in run_ranks(3, train_both_ways, {"three": argv("training.global_batch_size=3")}, tmp_path):
        assert_same(found["three"], num_steps=3)
        assert (found["three"].num_codes, found["three"].num_tables) == (4 * 2, 1)


def change_a_byte(argv: list[str], folder: Path, what: str) -> str:
    """How a run ends in which a byte of codes, embeddings or head changes on its way from another rank."""
    connect = PeerWeights.connect

    def flip(part: Tensor) -> Tensor:
        flipped = part.clone()
        flipped.view(torch.uint8).flatten()[-1] ^= 1
        return flipped

    def connect_and_flip(shared: PeerWeights) -> None:
        ends, codes = shared.ends, shared.codes.codes[9]
        if what == "embeddings":
            ends.embeddings["weight"] = PeerTable([flip(part) for part in ends.embeddings["weight"].parts])
        copies = {"codes": codes.copies, "lm_head": ends._copies, "embeddings": []}[what]
        copies[-1:] = [(destination, flip(source)) for destination, source in copies[-1:]]
        connect(shared)

    with mapped_files(folder), patch.object(PeerWeights, "connect", connect_and_flip):
        try:
            train_here(argv)
        except ProofError as error:
            return str(error)
    return "no complaint"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("codes", ".codes: 1 bytes differ"),
        ("embeddings", "embed_tokens.weight: 2 b"),
        ("lm_head", "lm_head.weight: 1 b"),
    ],
)
def test_a_byte_that_changes_on_the_way_is_found(argv, tmp_path: Path, what: str, name: str):
    own = argv("fsdp.reshard_after_forward=" + ("true" if what == "codes" else "false"))
    for complaint in run_ranks(2, change_a_byte, own, tmp_path, what):
        assert name in complaint and "NCCL_P2P_DISABLE=1" in complaint


def gather_two(model: TaskModel, processes: Processes) -> str:
    """What is said when two layers are gathered at a time that have the same buffers."""
    first, _, third, _ = model.layers
    assert isinstance(first, FSDPModule) and isinstance(third, FSDPModule)
    first.unshard()
    with pytest.raises(RuntimeError) as raised:
        third.unshard()
    first.reshard()
    return str(raised.value)


def train_and_gather_two(argv: list[str], folder: Path) -> str:
    with mapped_files(folder):
        return train_here(argv, gather_two).inspected


def test_two_layers_never_have_the_same_buffers_unnoticed(argv, tmp_path: Path):
    for complaint in run_ranks(2, train_and_gather_two, argv(), tmp_path):
        assert complaint == "Two layers are gathered at a time whose codes have the same place."


def train_where_rank_1_fails(argv: list[str], folder: Path) -> list[float]:
    """The losses of a run whose rank 1 can't have its memory read."""

    def fail(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
        if dist.get_rank(group) == 1:
            raise RuntimeError("no memory that others can read\nand more lines")
        return [torch.empty(num_bytes, dtype=torch.uint8)] * dist.get_world_size(group)

    with mapped_files(folder), patch.object(peer_weights, "share_memory", fail):
        return train_here([*argv, f"run.folder={folder}/run"]).losses


def test_all_ranks_gather_where_one_has_no_memory_to_read(runs, argv, tmp_path: Path):
    for losses in run_ranks(2, train_where_rank_1_fails, argv(), tmp_path):
        assert losses == runs()[0]["FULL_SHARD"].gathered.losses
    said = "codes are gathered by NCCL, as GPUs can't read one another's memory: no memory that others can read\n"
    assert said in (tmp_path / "run" / LOG_FILE).read_text()
