"""The kernels of a step of generation on a GPU: attention over slots, and sampling, against float64."""

from __future__ import annotations

import pytest
import torch

from qlora_fsdp.decoding.sampling import Draws, Sampling
from qlora_fsdp.layers.kernels.triton_sampling import log_probs
from tests.helpers.slots import Heads, distance

ROUNDED = 4e-3  # of the norm: outputs in bfloat16 alone are 1.7e-3 away, and shares are rounded too
POSITIONS = [0, 1, 63, 64, 200, 1023, 511, 767]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_parts", [None, 1, 8])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(8, 4, 128, 128),
        Heads(2, 3, 80, 48),
        Heads(16, 1, 192, 128),
        Heads(1, 8, 256, 256, softcap=50.0, window=300),
        Heads(1, 20, 512, 512),
        Heads(8, 8, 64, 64, window=128, has_sinks=True),
        Heads(1, 71, 64, 64),
    ],
    ids=str,
)
def test_attention_is_that_of_float64(heads: Heads, num_parts: int | None, dtype: torch.dtype) -> None:
    assert distance(heads, POSITIONS, 1024, num_parts, "cuda", dtype) < ROUNDED


@pytest.mark.parametrize("is_keyed", [False, True])
def test_tokens_are_drawn_by_their_probabilities(is_keyed: bool) -> None:
    """20,000 draws of one distribution: each token's share is within five deviations of its probability."""
    num = 20_000
    logits = torch.linspace(-3, 3, 6000, device="cuda")[torch.randperm(6000, device="cuda")]
    keep = torch.tensor([1, 17, 4095, 4096, 5999], device="cuda")
    row = torch.full_like(logits, float("-inf"))
    row[keep] = logits[keep]
    draws = None
    if is_keyed:
        draws = Draws(torch.arange(num, device="cuda"), torch.zeros(num, dtype=torch.int64, device="cuda"))
    tokens = Sampling(0.8).choose(row.bfloat16().expand(num, -1), None, draws)
    expected = (row.bfloat16().double() / 0.8).softmax(0)
    counts = torch.bincount(tokens, minlength=6000).double()
    deviation = (num * expected * (1 - expected)).sqrt()
    assert bool(((counts - num * expected).abs() <= 5 * deviation).all())


def test_a_graph_draws_anew_at_each_replay() -> None:
    logits = torch.zeros(64, 5000, device="cuda", dtype=torch.bfloat16)
    Sampling(1.0).choose(logits, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = Sampling(1.0).choose(logits, None)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(tuple(tokens.tolist()))
    assert len(set(seen)) == 3


def test_log_probabilities_are_those_of_float64() -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(33, 128_256, device="cuda")).bfloat16()
    chosen = torch.randint(128_256, (33,), device="cuda")
    expected = (logits.double() / 0.9).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    assert float((log_probs(logits, chosen, 0.9) - expected).abs().max()) < 1e-4
