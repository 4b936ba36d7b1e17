"""The kernels of a step of generation in Triton's interpreter: attention over slots, and sampling."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.slots import Heads, distance

from qlora_fsdp.decoding.sampling import Draws, Sampling, hash_factors
from qlora_fsdp.layers.kernels.launch import HAS_TRITON

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON, reason="tests/gpu runs the kernels themselves; without Triton none"
)
POSITIONS = [0, 1, 63, 64, 100, 191]


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 4),
        Heads(1, 3, 80, 48),
        Heads(2, 1, 192, 128, softcap=30.0),
        Heads(1, 20, window=70, has_sinks=True),
        Heads(1, 2, window=1000, softcap=5.0, has_sinks=True),
    ],
    ids=str,
)
def test_attention_is_that_of_float64(heads: Heads, num_parts: int) -> None:
    """Some parts of a short text have no keys, and nothing behind a text is read."""
    assert distance(heads, POSITIONS, 192, num_parts) < 1e-6


def test_tokens_are_drawn_as_torch_draws_them() -> None:
    """The vocabulary is three parts, of which the last is short."""
    from qlora_fsdp.layers.kernels import triton_sampling

    torch.manual_seed(0)
    logits = 3 * torch.randn(9, 9001)[:, :-1]
    draws = Draws(torch.randint(0, 2**62, (9,)), torch.arange(9))
    sampling = Sampling(0.7)
    expected = sampling.choose(logits, None, draws)
    found = triton_sampling.draw(logits, 0.7, draws.keys, draws.positions, hash_factors())
    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(
        triton_sampling.log_probs(logits, found, 0.7), sampling.log_probs(logits, expected), rtol=1e-5, atol=1e-5
    )


def test_tokens_of_no_probability_are_not_drawn() -> None:
    from qlora_fsdp.layers.kernels import triton_sampling

    logits = torch.full((64, 5000), float("-inf"))
    logits[:, [7, 4500]] = 0.0
    draws = Draws(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    found = triton_sampling.draw(logits, 1.0, draws.keys, draws.positions, hash_factors())
    assert set(found.tolist()) == {7, 4500}
    assert triton_sampling.log_probs(logits, found, 1.0).exp().tolist() == pytest.approx([0.5] * 64)
