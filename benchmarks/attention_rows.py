#!/usr/bin/env python3
"""Attention over packed rows of ever other lengths: FlashAttention-4 beside torch's varlen kernel, on one GPU.

    python benchmarks/attention_rows.py --out attention_rows.json

8B's heads, 16,384 tokens, causal, bfloat16. Rows have half to three halves of the mean. Prints milliseconds by CUDA
events; flash_4.MIN_MEAN_ROW is where the two meet. Without FlashAttention-4 it measures torch's kernel alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qlora_fsdp.layers.attention import flash_attention_4 as flash_4
from qlora_fsdp.layers.attention import varlen

NUM_TOKENS, NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 16_384, 32, 8, 128
MEAN_ROWS = (43, 64, 100, 150, 200, 256, 320, 400, 512, 800, 1600)
NUM_CALLS = 10


def main() -> None:
    """Print a line a mean length; write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("attention_rows.json"))
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    q, k, v = (random_heads(count, device).requires_grad_() for count in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS))
    grad = random_heads(NUM_HEADS, device)
    why_not = flash_4.why_not(NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, torch.bfloat16, device)
    print(why_not or f"milliseconds, forward and backward; {torch.cuda.get_device_name(device)}")
    rows = []
    for mean in MEAN_ROWS:
        lengths = row_lengths(mean)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        kernels = {"torch": partial(varlen.attend, q, k, v, varlen.PackedRows(starts, max(lengths)), None)}
        if why_not is None:
            kernels["flash_4"] = partial(flash_4.packed_attention, q, k, v, starts, max(lengths), None)
        row: dict[str, float] = {"mean": mean, "rows": len(lengths)}
        for name, kernel in kernels.items():
            row[f"{name}_forward"] = milliseconds(kernel)
            row[name] = milliseconds(partial(forward_and_backward, kernel, (q, k, v), grad))
        print(row, flush=True)
        rows.append(row)
    args.out.write_text(json.dumps(rows, indent=2) + "\n")


def forward_and_backward(kernel: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> None:
    """Gradients of the inputs, which are dropped."""
    torch.autograd.grad(kernel(), inputs, grad)


def random_heads(count: int, device: torch.device) -> Tensor:
    """x_NHD."""
    return torch.randn(NUM_TOKENS, count, HEAD_DIM, device=device, dtype=torch.bfloat16)


def row_lengths(mean: int) -> list[int]:
    """Of rows that fill NUM_TOKENS."""
    generator, lengths, left = torch.Generator().manual_seed(1), list[int](), NUM_TOKENS
    while left:
        drawn = int(torch.randint(mean // 2, mean * 3 // 2 + 1, (1,), generator=generator))
        lengths.append(min(drawn, left))
        left -= lengths[-1]
    return lengths


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, after two to warm up."""
    call()
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(NUM_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return round(float(start.elapsed_time(end)) / NUM_CALLS, 3)


if __name__ == "__main__":
    main()
