"""How long a layer's gated delta rule takes, forward and backward: `python benchmarks/delta_rule.py`.

In bfloat16, with heads as in Qwen3.5-9B (16 of keys and 32 of values, of 128 channels) and a row every 300 tokens,
replayed as a CUDA graph, beside transformers' function of plain torch; then each kernel's part. Prints a line of JSON
for each size: milliseconds, and the most memory that a step allocates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import unwrap

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from qlora_fsdp.layers.recurrent.convolution import short_convolution
from qlora_fsdp.layers.recurrent.delta_rule import gated_delta_rule

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
    return start.elapsed_time(end) / repeats


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


def main() -> None:
    """Measure all sizes."""
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for batch, length in SIZES:
        torch.manual_seed(0)
        heads = (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
        vectors = [torch.randn(batch, length, n, WIDTH, device="cuda").bfloat16() for n in heads]
        gate = -torch.rand(batch, length, VALUE_HEADS, device="cuda") * 0.5
        beta = torch.rand(batch, length, VALUE_HEADS, device="cuda")
        inputs = [tensor.requires_grad_() for tensor in (*vectors, gate, beta)]
        rows = (torch.arange(length, device="cuda") // ROW).int().expand(batch, -1).contiguous()
        weights = torch.randn(batch, length, VALUE_HEADS, WIDTH, device="cuda").bfloat16()

        def ours(inputs=inputs, rows=rows, weights=weights) -> tuple[Tensor, ...]:
            return torch.autograd.grad(gated_delta_rule(*inputs, rows), inputs, weights)

        def stock(inputs=inputs, weights=weights) -> tuple[Tensor, ...]:
            found, _state = unwrap(torch_chunk_gated_delta_rule)(*inputs, use_qk_l2norm_in_kernel=True)
            return torch.autograd.grad(found, inputs, weights)

        channels = 2 * KEY_HEADS * WIDTH + VALUE_HEADS * WIDTH
        x = torch.randn(batch, length, channels, device="cuda").bfloat16().requires_grad_()
        taps = torch.randn(channels, 4, device="cuda").bfloat16()
        grad = torch.randn_like(x)

        def convolve(x=x, taps=taps, rows=rows, grad=grad) -> tuple[Tensor, ...]:
            return torch.autograd.grad(short_convolution(x, taps, None, rows, True), x, grad)

        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        ours()
        peak = torch.cuda.max_memory_allocated() - held
        with torch.no_grad():
            forward = milliseconds(as_graph(lambda inputs=inputs, rows=rows: gated_delta_rule(*inputs, rows)))
        figures = {
            "tokens": f"{batch} x {length}",
            "forward": round(forward, 3),
            "forward and backward": round(milliseconds(as_graph(ours)), 3),
            "convolution": round(milliseconds(as_graph(convolve)), 3),
            "transformers, launched": round(milliseconds(stock, 2), 1),
            "peak GiB": round(peak / 2**30, 2),
        }
        print(json.dumps(figures), flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            ours()
            torch.cuda.synchronize()
        kernels = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
        parts = {event.key[:40]: round(event.device_time_total / 1000, 3) for event in kernels[:12]}
        print(json.dumps(parts), flush=True)


if __name__ == "__main__":
    main()
