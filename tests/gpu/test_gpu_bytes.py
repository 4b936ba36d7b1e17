"""What FSDP gathers over NCCL is, byte for byte, what stock bitsandbytes makes of the whole tensors on the same GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qlora_fsdp.layers.quantized.format import Format
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


def test_foreach_copy_changes_nan_patterns_of_bfloat16_but_not_bytes() -> None:
    """Why codes in bfloat16 storage get corrupted elsewhere: the copy with which FSDP2 gathers changes NaN patterns."""
    patterns = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.uint16).view(torch.bfloat16)
    copied = torch.empty_like(patterns)
    torch._foreach_copy_([copied], [patterns])
    changed = copied.view(torch.uint16) != patterns.view(torch.uint16)
    assert torch.equal(changed, changed & patterns.isnan()), "only NaN patterns may change"
    if not changed.any():
        pytest.skip("this torch copies them exactly: pytorch#159333 is mended")
    as_bytes = torch.empty_like(patterns)
    torch._foreach_copy_([as_bytes.view(torch.uint8)], [patterns.view(torch.uint8)])  # what a group of two dtypes does
    assert torch.equal(as_bytes.view(torch.uint16), patterns.view(torch.uint16))
