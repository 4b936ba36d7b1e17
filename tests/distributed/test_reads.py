"""Every byte of a checkpoint's weights is read once over all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from qlora_fsdp.weights.safetensors_files import read_headers
from tests.helpers.experts import make_experts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import settings, train_here

pytestmark = pytest.mark.distributed


def record_reads(argv: list[str]) -> list[tuple[str, int, int]]:
    """File, first and last byte of every read of this rank while it loads."""
    reads, preadv = [], os.preadv

    def recording(file: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(file, buffers, offset)
        reads.append((str(Path(f"/proc/self/fd/{file}").readlink()), offset, offset + count))
        return count

    os.preadv = recording
    train_here(argv, train=False)
    os.preadv = preadv
    return reads


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 1), ("llama", 3), ("qwen3_moe", 3)])
def test_every_byte_is_read_once(checkpoint: Callable, rows: Path, tmp_path: Path, family: str, num_ranks: int):
    # A tensor for each expert, and ranks whose shards begin inside one.
    folder = checkpoint(family) if family == "llama" else make_experts(family, tmp_path / family)
    argv = settings(folder, rows, f"training.global_batch_size={4 * num_ranks}", "lora=attention", packing=False)
    reads = sorted(read for rank in run_ranks(num_ranks, record_reads, argv) for read in rank)
    for (file, _, end), (next_file, start, _) in pairwise(reads):
        assert file != next_file or end <= start, "two reads overlap"
    assert sum(end - start for _, start, end in reads) == sum(t.num_bytes for t in read_headers(folder).values())
