"""Whose kernels dequantize the weights of a training run, by their names in torch's profiler, launched and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.weight_reader import WeightReader
from tests.helpers.experts import make_experts
from tests.helpers.quantized import make_quantized
from tests.helpers.ranks import once, run_ranks
from tests.helpers.runs import settings, train_here

BITSANDBYTES, TRITON, SCALES = "kDequantizeBlockwise", "_dequantize_kernel", "_dequantize_scales_kernel"
NUM_STEPS = 5
CASES = {
    "default": [],
    "launched": ["compute.cuda_graph=false"],
    "recomputed": ["memory=recompute"],
    "without double quantization": ["quant.bnb_4bit_use_double_quant=false"],
    "fp4": ["quant=fp4"],
    "triton": ["kernels.dequantize=triton"],
    "fp8": ["compute=fp8"],
    "kept for the run": ["memory.keep_dequantized=run"],
    "kept for a longer run": ["memory.keep_dequantized=run", f"training.max_steps={2 * NUM_STEPS}"],
    "experts": [],
}


def train_profiled(cases: dict[str, Sequence[str]]) -> dict[str, tuple[list[float], dict[str, int]]]:
    """Losses of each run, and how often each kernel ran in it."""
    found = {}
    for case, argv in cases.items():
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            trained = train_here(argv)
        found[case] = trained.losses, {event.key: event.count for event in profiled.key_averages()}
    return found


@pytest.fixture(scope="module")
def ran(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("profiled")
    models = {case: checkpoint("llama") for case in CASES} | {"experts": make_experts("mixtral", folder / "mixtral")}
    runs = {
        case: settings(models[case], rows, f"training.max_steps={NUM_STEPS}", "training.packing=auto", *more)
        for case, more in CASES.items()
    }
    world = once(lambda: run_ranks(1, train_profiled, runs, gpu=True)[0])

    def find(case: str) -> tuple[list[float], int, int, int]:
        """Losses, and how often bitsandbytes' kernel and ours dequantized, and ours the scales alone."""
        losses, kernels = world()[case]
        names = BITSANDBYTES, TRITON, SCALES
        return losses, *(sum(n for key, n in kernels.items() if name in key) for name in names)

    return find


@pytest.mark.parametrize("case", ["default", "launched", "recomputed", "without double quantization", "fp4"])
def test_bitsandbytes_dequantizes(ran, case: str):
    """Two layers of seven matrices, forward and backward, in every step. With double quantization one pass before."""
    losses, by_bitsandbytes, by_triton, num_scales = ran(case)
    assert by_bitsandbytes >= NUM_STEPS * 2 * 7 * 2 and by_triton == 0
    assert num_scales == (0 if case == "without double quantization" else by_bitsandbytes)
    assert losses[-1] < losses[0]


def test_weights_that_stay_are_dequantized_once(ran):
    """Each of the 14 weights in the two steps that are launched, once more when they end, and never again."""
    losses, by_bitsandbytes, by_triton, _ = ran("kept for the run")
    assert 3 * 14 <= by_bitsandbytes == ran("kept for a longer run")[1] < ran("default")[1] and by_triton == 0
    assert losses == pytest.approx(ran("default")[0], rel=1e-3)


def test_triton_dequantizes_if_asked(ran):
    losses, by_bitsandbytes, by_triton, num_scales = ran("triton")
    assert by_triton >= NUM_STEPS * 2 * 7 * 2 and by_bitsandbytes == num_scales == 0
    assert losses == pytest.approx(ran("default")[0], rel=1e-3)


def test_fp8_is_filled_by_triton(ran):
    assert ran("fp8")[2] > 0


def test_parts_of_experts_are_dequantized_by_triton_and_attention_by_bitsandbytes(ran):
    _, by_bitsandbytes, by_triton, _ = ran("experts")
    assert by_bitsandbytes > 0 and by_triton > 0


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("num_kept", [0, 2, 4])
def test_weights_of_a_graph_are_dequantized_beside_products(num_kept: int, holds: bool):
    """In a graph that has the second stream, with the same bits, also where the weights stay."""
    torch.manual_seed(0)
    weights = torch.randn(4, 2048, 2048, device="cuda").bfloat16()
    layers = torch.nn.Sequential(*(make_quantized(weight, Format("nf4", True)) for weight in weights))
    x = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def compute() -> torch.Tensor:
        (grad,) = torch.autograd.grad(layers(x).sum(), x)
        return grad

    reader = WeightReader(layers, x.device, layers[4 - num_kept :], holds)
    with reader.noting():
        expected = compute()
    if holds:
        reader.hold()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)), reader.reading():
        found = compute()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert len(reader.held) == num_kept * holds
    assert reader.order == [*layers, *reversed(layers)] and torch.equal(found, expected)
