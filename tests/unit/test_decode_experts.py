"""Experts while text is generated: their codes multiplied by the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.decode_experts import compare_experts, make_experts

from qlora_fsdp.layers.decode_linear import find_experts
from qlora_fsdp.layers.experts.decode import why_not_coded
from qlora_fsdp.layers.kernels.launch import HAS_TRITON
from qlora_fsdp.layers.kernels.triton_products import best_expert_tile
from qlora_fsdp.layers.kernels.triton_transposed_products import transposed_tile
from qlora_fsdp.layers.quantized.format import Format

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON, reason="tests/gpu runs the kernels themselves; without Triton none"
)


@interpreted
@pytest.mark.parametrize(
    ("family", "format", "num_tokens", "rank"),
    [
        ("qwen3_moe", Format("nf4", True), 9, 4),
        ("qwen3_moe", Format("fp4"), 60, 0),  # of an expert, more rows than a tile has
        ("mixtral", Format("nf4", True), 3, 12),
        ("mixtral", Format("int8"), 9, 4),
        ("mixtral", Format("int4", blocksize=32), 9, 4),
        ("qwen3_moe", Format("mxfp4", blocksize=32), 9, 4),
        ("gpt_oss", Format("int4", blocksize=32), 9, 4),
        ("nemotron_h", Format("nf4"), 9, 4),  # no gate
        ("gpt_oss", Format("nf4", True), 9, 4),  # scales lie along the outputs, and there are biases
        ("gpt_oss", Format("fp4"), 60, 20),
        ("gpt_oss", Format("nf4", True, 32), 3, 0),
    ],
    ids=str,
)
def test_experts_are_those_of_dequantized_weights(family: str, format: Format, num_tokens: int, rank: int) -> None:
    assert compare_experts(family, format, num_tokens, rank) < 1e-5


def test_who_is_multiplied_with_codes() -> None:
    """Weights that are not quantized are not."""
    holder = torch.nn.Module()
    holder.experts, _ = make_experts("qwen3_moe", Format("nf4", True), 128, 64, 0)
    assert list(find_experts(holder)) == [holder.experts]
    del holder.experts.down_proj
    holder.experts.down_proj = torch.nn.Parameter(torch.zeros(6, 128, 64))
    assert why_not_coded(holder.experts) == "it is not quantized"
    assert not find_experts(holder)


def test_tiles_follow_the_rows_of_an_expert() -> None:
    """Of Qwen3-30B-A3B, 64 texts have four rows for each expert."""
    tiles = [best_expert_tile(2048, 8 * texts, 128, 64, True) for texts in (1, 64, 128, 256, 512, 513)]
    assert [tile and tile.rows for tile in tiles] == [16, 16, 16, 32, 64, None]
    narrow = best_expert_tile(2880, 256, 32, 64, True)
    assert narrow is not None and narrow.step == 1
    assert best_expert_tile(100, 8, 8, 64, True) is None
    tiles = [transposed_tile(2880, 4 * texts, 32, True) for texts in (1, 64, 128, 256, 257)]
    assert [tile and tile.rows for tile in tiles] == [16, 16, 32, 64, None]
    assert transposed_tile(2880, 4, 32, False) is None
