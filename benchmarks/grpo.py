#!/usr/bin/env python3
r"""Seconds of a step on answers that the model writes itself, by phase; and which kernels they go to.

    python benchmarks/grpo.py --shape 8b --out grpo.json
    python benchmarks/grpo.py --shape tiny --prompts 4 --prompt-tokens 32 --new-tokens 16 --generations 4

A run of `qlora_fsdp.train task=grpo` in this process, on one GPU: a model of random weights of this shape in nf4, an
adapter of rank 16 on all linear layers, random prompts of bytes. As the model is random, hardly an answer ends early.
The first step compiles, records its graph, and is profiled: a few steps of the slots in the middle of the answers, and
one micro-batch. So the later ones are the figure. Settings after the options are taken as `train` takes them. The plan
is printed beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from generation import device_name
from torch.profiler import ProfilerActivity, profile

from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.world import World
from qlora_fsdp.decoding.steps import Steps
from qlora_fsdp.training.capture.passes import EagerPasses
from qlora_fsdp.training.run import run

MODELS = {"tiny": "tiny", "1b": "llama3.2-1b-base", "8b": "llama3.1-8b-base", "70b": "llama3.1-70b-base"}
# Of ids, as random ones of a large vocabulary are no bytes. Half of the tokens are even at first, and the adapter of a
# model of random weights can learn to write more of them
FUNCTION = """def even(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
NUM_PROFILED = 4  # steps of the slots
NUM_SHOWN = 16  # kernels
NUM_LETTERS = 26
FIGURES = (
    "reward",
    "seconds",
    "rollout_seconds",
    "rollout_tokens_per_second",
    "reward_seconds",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/p99",
    "completions/mean_length",
    "frac_reward_zero_std",
    "grad_norm",
    "entropy",
    "gpu_peak_gib",
)


def main() -> None:
    """Run, print the figures, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help=f"{', '.join(MODELS)}, or a preset of conf/model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--generations", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--steps", type=int, default=2, help="of which the first is profiled and does not count")
    parser.add_argument("--out", type=Path, default=Path("grpo.json"))
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        argv = settings_of(args, Path(scratch))
        kernels = run_profiled(argv, args)
        folder = Path(scratch) / "run"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
    steps = [shown(line) for line in lines if "loss" in line]
    for number, step in enumerate(steps, start=1):
        print(f"step {number}: {json.dumps(step)}")
    memory = summary["memory"]
    planned = memory["predicted"] or {}
    needed = {name: planned.get(name) for name in ("needed_gib", "micro_batch_size", "activations", "rollouts")}
    print(f"planned  {json.dumps({**needed, **planned.get('tensors_gib', {})})}")
    print(f"measured {json.dumps(memory['measured'])}")
    found: dict[str, Any] = {
        "device": device_name(),
        "torch": torch.__version__,
        "command": sys.argv[1:],
        "steps": steps,
    }
    found |= {"kernels": kernels, "memory": memory, "setup_seconds": summary["setup_seconds"]}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def settings_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """The settings of the run, whose prompts and function are written into the folder."""
    draw = random.Random(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(args.prompts * args.steps):
            letters = [chr(ord("a") + draw.randrange(NUM_LETTERS)) for _ in range(args.prompt_tokens - 1)]  # and <bos>
            file.write(json.dumps({"prompt": "".join(letters)}) + "\n")
    (folder / "functions.py").write_text(FUNCTION)
    return [
        "task=grpo",
        f"model={MODELS.get(args.shape, args.shape)}",
        "model.weights=random",
        "model.tokenizer_path=bytes",
        f"data={folder / 'prompts.jsonl'}",
        f"run.folder={folder / 'run'}",
        f"reward.functions=[{folder / 'functions.py'}:even]",
        f"training.max_steps={args.steps}",
        f"training.max_length={args.prompt_tokens + args.new_tokens}",
        f"training.global_batch_size={args.prompts}",
        f"rollout.num_generations={args.generations}",
        f"rollout.max_completion_length={args.new_tokens}",
        *args.settings,
    ]


def run_profiled(argv: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run, and return the milliseconds of kernels: of a step of the slots, and of a micro-batch."""
    found: dict[str, dict[str, float]] = {}
    profiler: Any = None
    step_of_slots, pass_of_training = Steps.run, EagerPasses.run
    first = args.new_tokens // 2

    def run_slots(steps: Steps) -> Any:
        nonlocal profiler
        if "slots" not in found and steps.num_run == first:
            profiler = profile(activities=activities()).__enter__()
        tokens = step_of_slots(steps)
        if "slots" not in found and steps.num_run == first + NUM_PROFILED:
            found["slots"] = ended(profiler, NUM_PROFILED)
        return tokens

    def run_micro_batch(passes: EagerPasses, batch: Any, is_last: bool) -> Any:
        if "micro_batch" in found or not is_last:
            return pass_of_training(passes, batch, is_last)
        own = profile(activities=activities()).__enter__()
        loss = pass_of_training(passes, batch, is_last)
        found["micro_batch"] = ended(own, 1)
        return loss

    with patch.object(Steps, "run", run_slots), patch.object(EagerPasses, "run", run_micro_batch):
        run(load_config(argv), World.from_environment(os.environ))
    for name, kernels in found.items():
        print(f"kernels of {name}, milliseconds:")
        for kernel, milliseconds in list(kernels.items())[:NUM_SHOWN]:
            print(f"  {milliseconds:>9.3f}  {kernel}")
    return found


def activities() -> list[ProfilerActivity]:
    """What is profiled: kernels, or operators where there is no GPU."""
    return [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]


def ended(profiler: Any, number: int) -> dict[str, float]:
    """End the profile. Returns the milliseconds of each kernel in one of `number` steps, most first, after `all`."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    is_cuda = torch.cuda.is_available()
    times: Callable[[Any], float] = (lambda event: event.self_device_time_total) if is_cuda else own_cpu_time
    found = {event.key[:120]: times(event) / 1000 / number for event in profiler.key_averages()}
    most = sorted(found.items(), key=lambda pair: -pair[1])
    return {"all": round(sum(found.values()), 3)} | {name: round(value, 3) for name, value in most[: 2 * NUM_SHOWN]}


def own_cpu_time(event: Any) -> float:
    """Microseconds that an operator took itself."""
    return float(event.self_cpu_time_total)


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """The figures of a step, with the seconds of its training, which is what is left of it."""
    found = {name: line[name] for name in FIGURES if name in line}
    found["training_seconds"] = line["seconds"] - line["rollout_seconds"] - line["reward_seconds"]
    tokens = line["num_tokens"]
    found["training_tokens_per_second"] = tokens / found["training_seconds"]
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()}


if __name__ == "__main__":
    main()
