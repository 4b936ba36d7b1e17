"""What FSDP gathers over NCCL is, byte for byte, what stock bitsandbytes makes of the whole tensors on the same GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qlora_fsdp.layers import Format
from tests.helpers.blocks import count_wrong_bytes_everywhere, load_with_a_flipped_bit
from tests.helpers.ranks import run_ranks


def test_no_byte_differs_from_bitsandbytes(blocks: Path):
    for rank, cases in enumerate(run_ranks(torch.cuda.device_count(), count_wrong_bytes_everywhere, blocks, gpu=True)):
        for case, counts in cases.items():
            assert {name: n for name, n in counts.items() if n} == {}, f"rank {rank}, {case}"
            assert sum(name.endswith(".codes") for name in counts) >= 10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU gathers nothing")
def test_a_flipped_bit_is_caught_and_named(blocks: Path):
    num_ranks = torch.cuda.device_count()
    folder, format = blocks / f"{torch.bfloat16}-1", Format("nf4", double_quant=True)
    for complaint in run_ranks(num_ranks, load_with_a_flipped_bit, folder, format, gpu=True):
        assert complaint.startswith("ProofError")
        assert f"rank {num_ranks - 1}: layers.1.linear3.codes: 1 bytes differ" in complaint
