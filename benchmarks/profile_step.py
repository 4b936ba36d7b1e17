#!/usr/bin/env python3
r"""Where a training step's time goes, by part: a run of qlora_fsdp.train under torch's profiler.

    python benchmarks/profile_step.py model.path=/tmp/random-8b data=random training.max_length=4096 \
        training.micro_batch_size=4 memory=keep training.max_steps=8 run.folder=/tmp/profile
    torchrun --nproc_per_node 4 benchmarks/profile_step.py ...

Profiles steps 4 and 5. Writes `profile.json` (milliseconds a step by part) and `trace.json.gz` (for Perfetto or
chrome://tracing) into the run folder, of the first rank, and prints the table. Needs training.max_steps of 6 or more.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from qlora_fsdp.common.startup import end_process
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.world import World
from qlora_fsdp.training import loop
from qlora_fsdp.training.optim import learning_rate_at
from qlora_fsdp.training.run import run

FIRST_STEPS, NUM_STEPS = 3, 2

# The first part whose pattern is found in a kernel's name gets its time.
PARTS = {
    "communication": r"nccl",
    "attention": r"sdpa|flash|fmha|cudnn::fusion",
    "matrix products": r"nvjet|gemm|cutlass|splitKreduce|cublas",
    "dequantize": r"_dequantize_kernel|kDequantize|_quantize_rows",
    "gated activation": r"^_gate_forward|^_gate_backward|swiglu|geglu",
    "norms": r"rms_norm|layer_norm|^_norm_forward|^_norm_backward",
    "rotary": r"rope",
    "loss": r"cross_entropy|element_mul",
    "optimizer": r"multi_tensor_apply|[Ff]used[Aa]dam",
    "copies": r"Mem(cpy|set)|copy|Copy",
    "elementwise": r"",
}
ANNOTATIONS = re.compile(r"^(ProfilerStep|Optimizer\.|nccl:|FSDP|c10d|autograd|## )")

Interval = tuple[float, float]


def main() -> None:
    """Run, and report on the first rank."""
    config = load_config(sys.argv[1:])
    steps = schedule(wait=FIRST_STEPS - 1, warmup=1, active=NUM_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], schedule=steps) as profiler:

        def begin_step(step: int, *others: Any) -> float:
            if step > 0:
                profiler.step()
            return learning_rate_at(step, *others)

        vars(loop)["learning_rate_at"] = begin_step  # called first in a step, when the GPU is done with the last
        run(config, World.from_environment(os.environ))
    if int(os.environ.get("RANK", 0)) == 0:
        folder = Path(config.run.folder)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        report = summarize([event for event in profiler.events() or [] if str(event.device_type).endswith("CUDA")])
        (folder / "profile.json").write_text(json.dumps(report, indent=2) + "\n")
        for part, milliseconds in report.items():
            print(f"{part:<24}{milliseconds:>10.1f} ms {milliseconds / report['step'] * 100:>6.1f} %")
    end_process(0)


def summarize(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds a step: of each part, exposed communication, idle, and the whole step."""
    parts: dict[str, list[Interval]] = {part: [] for part in PARTS}
    for event in events:
        if not ANNOTATIONS.match(event.name):
            part = next(part for part, pattern in PARTS.items() if re.search(pattern, event.name))
            parts[part].append((event.time_range.start, event.time_range.end))
    everything = [interval for intervals in parts.values() for interval in intervals]
    compute = [i for part, intervals in parts.items() if part != "communication" for i in intervals]
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    report = {part: sum(end - start for start, end in intervals) for part, intervals in parts.items()}
    report["communication exposed"] = covered(everything) - covered(compute)
    report["idle"] = whole - covered(everything)
    report["step"] = whole
    return {part: round(time / 1000 / NUM_STEPS, 2) for part, time in report.items()}


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    main()
