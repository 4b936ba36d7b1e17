"""Experts while text is generated, on a GPU: products with codes beside dequantized weights in float32."""

from __future__ import annotations

import pytest
import torch

from qlora_fsdp.layers.quantized.format import Format
from tests.helpers.decode_experts import compare_experts


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 96])
@pytest.mark.parametrize(
    ("family", "format", "rank"),
    [
        ("qwen3_moe", Format("nf4", True), 16),
        ("qwen3_moe", Format("nf4", True), 0),
        ("mixtral", Format("fp4"), 5),
        ("mixtral", Format("int8"), 8),
        ("nemotron_h", Format("nf4", True), 16),
        ("qwen3_moe", Format("mxfp4", blocksize=32), 16),
        ("gpt_oss", Format("int4", blocksize=32), 16),
        ("gpt_oss", Format("nf4", True), 16),
        ("gpt_oss", Format("fp4"), 0),
        ("gpt_oss", Format("nf4", True, 128), 20),
    ],
    ids=str,
)
def test_experts_are_those_of_dequantized_weights(family: str, format: Format, rank: int, num_tokens: int) -> None:
    """Up to 32 rows for an expert on average, the most that are not dequantized. Products and activation round."""
    error = compare_experts(family, format, num_tokens, rank, (512, 256), "cuda", torch.bfloat16)
    assert error < 1e-2
