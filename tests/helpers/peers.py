"""Runs whose ranks read codes from one another's memory, beside the same runs in which FSDP gathers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp.runtime import hardware
from qlora_fsdp.sharding import peer_weights
from qlora_fsdp.sharding.peer_weights import PeerWeights
from tests.helpers.checkpoints import SHAPE
from tests.helpers.runs import Trained, gathered_adapter, train_here


class BothWays(NamedTuple):
    """A run that gathers all weights, and the same that reads frozen ones from other ranks.

    Attributes:
        num_codes: tensors of codes that are read.
        num_buffers: buffers that they are read into.
        num_tables: parameters of the embeddings whose rows are read.
        holds_head: whether each rank has the whole head.
    """

    gathered: Trained
    read: Trained
    num_codes: int
    num_buffers: int
    num_tables: int
    holds_head: bool


def make_layers(folder: Path, num_layers: int) -> Path:
    """A random Llama whose MLP has 192 columns: two, three and four ranks divide them."""
    shape = SHAPE | {"num_hidden_layers": num_layers, "intermediate_size": 192}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).save_pretrained(folder)
    return folder


@contextmanager
def mapped_files(folder: Path) -> Iterator[None]:
    """A context in which files that all ranks map stand for the memory of GPUs."""

    def map_file(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
        files = [folder / f"memory-{rank}" for rank in range(dist.get_world_size(group))]
        files[dist.get_rank(group)].write_bytes(bytes(num_bytes))
        dist.barrier(group)
        return [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]

    with (
        patch.object(peer_weights, "share_memory", map_file),
        patch.object(peer_weights, "can_read_peers", lambda processes: True),
        patch.object(hardware, "can_read_peers", lambda processes: True),
    ):
        yield


def train_both_ways(cases: Mapping[str, Sequence[str]], folder: Path | None = None) -> dict[str, BothWays]:
    """Train each case on this rank of a world, both ways; with a folder, files there stand for the memory of GPUs."""
    found = {}
    for case, argv in cases.items():
        with patch.object(peer_weights, "can_read_peers", lambda processes: False):
            gathered = train_here(argv, gathered_adapter)
        made: list[PeerWeights] = []

        def keep(*args: Any, made: list[PeerWeights] = made) -> PeerWeights:
            made.append(PeerWeights(*args))
            return made[0]

        own = None if folder is None else folder / case.replace(" ", "-")
        if own is not None:
            own.mkdir(exist_ok=True)
        with patch.object(peer_weights, "PeerWeights", keep), nullcontext() if own is None else mapped_files(own):
            read = train_here(argv, gathered_adapter)
        (shared,) = made
        codes, ends = shared.codes.codes, shared.ends
        buffers = {id(tensor.buffer): tensor.buffer for tensor in codes}
        num_filled = sum(buffer.holder is not None for buffer in buffers.values())
        holds_head = ends.head is not None
        found[case] = BothWays(gathered, read, len(codes), num_filled, len(ends.embeddings), holds_head)
    return found


def assert_same(found: BothWays, num_steps: int) -> None:
    """Losses and trained parameters are the same to the bit."""
    assert found.read.losses == found.gathered.losses and len(found.read.losses) == num_steps
    mine, others = found.read.inspected, found.gathered.inspected
    assert mine.keys() == others.keys() and all(map(torch.equal, mine.values(), others.values()))
    assert any(tensor.abs().sum() > 0 for tensor in mine.values())
