"""What FSDP gathers is, byte for byte, what bitsandbytes makes of the whole tensors; and a wrong byte is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.layers.quantized.format import Format
from tests.helpers.blocks import count_wrong_bytes_everywhere, load_with_a_flipped_bit
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_no_byte_differs_from_bitsandbytes(blocks: Path, num_ranks: int):
    """Of the number of ranks only the rows of each depend: one number tries every format with and without offload."""
    with_turns = num_ranks != 3
    for rank, cases in enumerate(run_ranks(num_ranks, count_wrong_bytes_everywhere, blocks, with_turns)):
        for case, counts in cases.items():
            assert {name: n for name, n in counts.items() if n} == {}, f"rank {rank}, {case}"
            assert sum(name.endswith(".codes") for name in counts) >= 10


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1000])  # a tensor at once; a few rows of each rank
def test_a_flipped_bit_is_caught_and_named(blocks: Path, piece_bytes: int):
    folder = blocks / f"{torch.bfloat16}-1"
    for complaint in run_ranks(3, load_with_a_flipped_bit, folder, Format("nf4", double_quant=True), piece_bytes):
        assert complaint.startswith("ProofError") and "rank 2: layers.1.linear3.codes: 1 bytes differ" in complaint
