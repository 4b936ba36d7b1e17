"""How long a layer's gated delta rule takes, forward and backward: `python benchmarks/delta_rule.py`.

In bfloat16, with heads as in Qwen3.5-9B (16 of keys and 32 of values, of 128 channels) and a row every 300 tokens,
replayed as a CUDA graph, beside transformers' function of plain torch. For each size it prints a line of JSON with
milliseconds and the most memory that a step allocates, and one with each kernel's part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import unwrap

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qlora_fsdp.layers.recurrent.delta_rule import gated_delta_rule
from qlora_fsdp.layers.recurrent.replace import short_convolution

SIZES = ((4, 4096), (1, 4096), (1, 1024))
KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
ROW = 300


def milliseconds(step: Callable[[], object], repeats: int = 10) -> float:
    """A step's time on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed / repeats


def as_graph(step: Callable[[], object]) -> Callable[[], object]:
    """The step, recorded as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(batch: int, length: int) -> None:
    """Measure one size, and print its figures and the kernels' parts."""
    torch.manual_seed(0)
    query, key = torch.randn(2, batch, length, KEY_HEADS, WIDTH, device="cuda").bfloat16().unbind()
    value = torch.randn(batch, length, VALUE_HEADS, WIDTH, device="cuda").bfloat16()
    gate = -torch.rand(batch, length, VALUE_HEADS, device="cuda") * 0.5
    beta = torch.rand(batch, length, VALUE_HEADS, device="cuda")
    inputs = (query, key, value, gate, beta)
    for tensor in inputs:
        tensor.requires_grad_()
    rows = (torch.arange(length, device="cuda") // ROW).int().expand(batch, -1).contiguous()
    grad_output = torch.randn(value.shape, device="cuda").bfloat16()
    channels = 2 * KEY_HEADS * WIDTH + VALUE_HEADS * WIDTH
    x = torch.randn(batch, length, channels, device="cuda").bfloat16().requires_grad_()
    taps = torch.randn(channels, 4, device="cuda").bfloat16()
    grad_convolved = torch.randn(x.shape, device="cuda").bfloat16()

    def forward() -> Tensor:
        with torch.no_grad():
            return gated_delta_rule(query, key, value, gate, beta, rows)

    def ours() -> tuple[Tensor, ...]:
        found = gated_delta_rule(query, key, value, gate, beta, rows)
        return torch.autograd.grad(found, inputs, grad_output)

    def stock() -> tuple[Tensor, ...]:
        found = unwrap(torch_chunk_gated_delta_rule)(*inputs, use_qk_l2norm_in_kernel=True)[0]
        return torch.autograd.grad(found, inputs, grad_output)

    def convolve() -> tuple[Tensor, ...]:
        return torch.autograd.grad(short_convolution(x, taps, None, rows, True), x, grad_convolved)

    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ours()
    peak = torch.cuda.max_memory_allocated() - held
    figures = {
        "tokens": f"{batch} x {length}",
        "forward": round(milliseconds(as_graph(forward)), 3),
        "forward and backward": round(milliseconds(as_graph(ours)), 3),
        "convolution": round(milliseconds(as_graph(convolve)), 3),
        "transformers, launched": round(milliseconds(stock, 2), 1),
        "peak GiB": round(peak / 2**30, 2),
    }
    print(json.dumps(figures), flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        ours()
        convolve()
        torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.device_time_total > 0]
    kernels.sort(key=lambda event: -event.device_time_total)
    print(json.dumps({event.key[:40]: round(event.device_time_total / 1000, 3) for event in kernels}), flush=True)


if __name__ == "__main__":
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for size in SIZES:
        measure(*size)
