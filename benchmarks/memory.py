#!/usr/bin/env python3
r"""Predicted beside measured memory, and speed, of many short runs on one host of GPUs.

    python benchmarks/memory.py --set calibrate --out memory.json

Runs that need fewer GPUs than there are go side by side, and the same processes make one run after another, so that
most of the time is spent in steps. Weights and data are random (`model.weights=random`). Prints a row a run and writes
JSON. Sets: `calibrate`, the plan against the measurement; `fit`, what must fit; `auto`, what auto chooses beside the
fastest policies by hand that fit; `short`, steps of few tokens; `presets`, what one GPU trains of every model in
conf/model; `recent`, shapes of 2026 on one GPU; `scale`, from
one GPU to eight, where every GPU takes part in each size (a host's GPUs differ by a few per cent). `memory.target_gib`
holds torch's allocator to the target, less what CUDA and NCCL take.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRST_PORT = 29_700
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: a preset of conf/model.
        length: tokens a sequence.
        policy: of memory.activations.
        target_gib: of memory.target_gib.
        steps: optimizer steps.
        shape: what stands in the table for `model.config`; None for a preset.
    """

    model: str
    num_gpus: int
    length: int
    micro_batch_size: int
    policy: str
    overrides: tuple[str, ...] = ()
    target_gib: float | None = None
    steps: int = 4
    shape: str | None = None

    @property
    def name(self) -> str:
        if self.shape is not None:
            return f"{self.shape} {self.length} x {self.micro_batch_size} {self.policy}"
        target = f" in {self.target_gib:g} GiB" if self.target_gib else ""
        more = " " + " ".join(self.overrides) if self.overrides else ""
        return f"{self.model} {self.num_gpus} GPU {self.length} x {self.micro_batch_size} {self.policy}{more}{target}"

    def arguments(self, folder: Path) -> list[str]:
        """Of qlora_fsdp.train."""
        return [
            *("experiment=dry_run", f"model={self.model}", "data.max_rows=64"),
            *(f"training.max_steps={self.steps}", f"training.max_length={self.length}"),
            *(f"training.micro_batch_size={self.micro_batch_size}", "training.global_batch_size=null"),
            "fsdp.sharding_strategy=FULL_SHARD",
            *(f"memory.activations={self.policy}", f"memory.target_gib={self.target_gib or 'null'}"),
            *(f"run.folder={folder}", "run.overwrite=true", f"data.cache_folder={folder}/cache", *self.overrides),
        ]


def shape_case(shape: str, length: int, micro_batch_size: int, model_config: str, steps: int = 8) -> Case:
    """A model without a preset, by its config in the settings, on one GPU."""
    overrides = (f"model.config={{{model_config}}}", "model.tokenizer_path=bytes", "lora.r=16", *NO_SHARD)
    return Case("custom", 1, length, micro_batch_size, "auto", overrides, None, steps, shape)


OFFLOAD = ("fsdp=offload",)
ACCUMULATE = ("training.global_batch_size=16",)
NO_SHARD = ("fsdp.sharding_strategy=NO_SHARD",)
RESHARD = ("fsdp.reshard_after_forward=true",)
QWEN3_5_9B = (
    "model_type: qwen3_5_text, vocab_size: 248320, hidden_size: 4096, intermediate_size: 12288, num_hidden_layers: 32, "
    "num_attention_heads: 16, num_key_value_heads: 4, head_dim: 256, linear_num_key_heads: 16, "
    "linear_num_value_heads: 32, linear_key_head_dim: 128, linear_value_head_dim: 128, max_position_embeddings: 262144"
)
QWEN3_5_27B = (
    "model_type: qwen3_5_text, vocab_size: 248320, hidden_size: 5120, intermediate_size: 17408, num_hidden_layers: 64, "
    "num_attention_heads: 24, num_key_value_heads: 4, head_dim: 256, linear_num_key_heads: 16, "
    "linear_num_value_heads: 48, linear_key_head_dim: 128, linear_value_head_dim: 128, max_position_embeddings: 262144"
)
# Sizes of Gemma 4: transformers' src/transformers/models/gemma4/convert_gemma4_weights.py.
GEMMA4_E4B = (
    "model_type: gemma4_text, hidden_size: 2560, hidden_size_per_layer_input: 256, intermediate_size: 10240, "
    "num_hidden_layers: 42, num_attention_heads: 8, num_key_value_heads: 2, global_head_dim: 512, "
    "num_kv_shared_layers: 18, final_logit_softcapping: 30.0"
)
GEMMA4_31B = (
    "model_type: gemma4_text, hidden_size: 5376, hidden_size_per_layer_input: 0, intermediate_size: 21504, "
    "num_hidden_layers: 60, num_attention_heads: 32, num_key_value_heads: 16, num_global_key_value_heads: 4, "
    "attention_k_eq_v: true, sliding_window: 1024, final_logit_softcapping: 30.0, max_position_embeddings: 262144"
)
GEMMA4_26B_A4B = (
    "model_type: gemma4_text, hidden_size: 2816, hidden_size_per_layer_input: 0, intermediate_size: 2112, "
    "num_hidden_layers: 30, num_attention_heads: 16, num_key_value_heads: 8, num_global_key_value_heads: 2, "
    "attention_k_eq_v: true, enable_moe_block: true, num_experts: 128, moe_intermediate_size: 704, top_k_experts: 8, "
    "sliding_window: 1024, final_logit_softcapping: 30.0, max_position_embeddings: 262144"
)
SETS = {
    "calibrate": [  # sizes, ranks, lengths, policies, offload
        Case("llama3-8b", 1, 1024, 8, "none"),
        Case("llama3-8b", 1, 4096, 4, "selective"),
        Case("llama3-8b", 1, 4096, 4, "full"),
        Case("llama3-8b", 1, 8192, 1, "half"),
        Case("llama3-8b", 1, 4096, 4, "full", ("compute=fp8",)),
        Case("llama3-8b", 1, 8192, 2, "offload"),
        Case("llama3-8b", 1, 4096, 1, "full", OFFLOAD),
        Case("llama3-8b", 2, 4096, 4, "none"),
        Case("llama3-8b", 2, 8192, 1, "full", OFFLOAD),
        Case("llama3-8b", 2, 1024, 4, "half", ACCUMULATE),
        Case("llama3-70b", 2, 1024, 1, "full"),
        Case("llama3-70b", 2, 4096, 1, "none"),
        Case("llama3-70b", 2, 8192, 1, "offload", OFFLOAD),
        Case("llama3-70b", 4, 4096, 1, "none"),
        Case("llama3-70b", 4, 8192, 1, "full"),
        Case("llama3-70b", 4, 4096, 1, "offload", OFFLOAD),
        Case("llama3-70b", 4, 1024, 2, "full", ACCUMULATE),
        Case("llama3-8b", 4, 4096, 2, "none", ("quant=int8",)),
    ],
    "fit": [
        Case("llama3-8b", 1, 2048, 1, "auto", (), 10, 10),
        Case("llama3-70b", 2, 2048, 1, "auto", ("optim=adamw_8bit",), 24, 10),
        Case("llama3-70b", 2, 2048, 1, "auto", ("optim=adamw_8bit", "quant.embeddings=int8"), 22.8, 10),
        Case("llama3-70b", 2, 2048, 1, "auto", OFFLOAD, 12, 10),
        Case("llama3-70b", 2, 2048, 1, "auto", (), 24, 10),
        Case("llama3-70b", 4, 8192, 1, "auto", (), 40),
        Case("llama3-405b", 8, 1024, 1, "auto", (), 40, 10),
    ],
    # By hand only what may be the fastest that fits: the next larger policy does not fit, by far.
    "auto": [
        *(Case("llama3-8b", 1, 4096, 4, "auto", (), target, 8) for target in (24, 40, 80, 139)),
        Case("llama3-8b", 1, 4096, 4, "full", (), 24, 8),
        Case("llama3-8b", 1, 4096, 4, "half", (), 40, 8),
        Case("llama3-8b", 1, 4096, 4, "none", (), 80, 8),
    ],
    "short": [  # steps that wait for Python
        *(Case("llama3-8b", 1, 2048, 1, "auto", (), target, 10) for target in (10, 12, 16)),
        *(Case("llama3-8b", 1, length, 1, "none", (), None, 10) for length in (512, 1024, 2048, 4096)),
        Case("llama3-8b", 1, 2048, 1, "full", (), None, 10),
    ],
    "presets": [
        Case(model, 1, 4096, 1, policy)
        for model in ("mistral-7b", "qwen3-8b", "phi4", "gemma3-27b", "qwen3-32b", "llama3-70b", "qwen2.5-72b")
        for policy in ("auto", "full")
    ],
    # Bamba has Mamba-2 layers, which torch computes where no package is installed, padded and launched one by one.
    "recent": [
        shape_case("Qwen3.5-9B", 4096, 4, QWEN3_5_9B),
        Case("qwen3-8b", 1, 4096, 4, "auto", ("lora.r=16", *NO_SHARD), None, 10),
        shape_case("Qwen3.5-9B", 1024, 1, QWEN3_5_9B, 20),
        shape_case("Gemma 4 E4B", 4096, 4, GEMMA4_E4B),
        shape_case("Qwen3.5-35B-A3B", 4096, 4, "model_type: qwen3_5_moe_text"),
        shape_case("Gemma 4 26B-A4B", 4096, 4, GEMMA4_26B_A4B),
        shape_case("Qwen3.6-27B", 4096, 4, QWEN3_5_27B, 5),
        shape_case("Gemma 4 31B", 4096, 4, GEMMA4_31B, 5),
        shape_case("GLM-4.7-Flash", 4096, 4, "model_type: glm4_moe_lite"),
        shape_case("Qwen3-VL 12B, text", 4096, 4, "model_type: qwen3_vl"),
        shape_case("Bamba 9B", 4096, 1, "model_type: bamba", 4),
    ],
    "scale": [
        Case("llama3-8b", num_gpus, 4096, 4, "none", more, None, 10)
        for num_gpus in (1, 2, 4, 8)
        for more in ([(), NO_SHARD, RESHARD] if num_gpus > 1 else [()])
    ],
}


def main() -> None:
    """Run a set of cases; print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="calibrate")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--num-gpus", type=int, default=2, help="of this host; cases that need more are left out")
    parser.add_argument("--out", type=Path, default=Path("memory.json"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args.worker)
        return
    cases = [case for case in SETS[args.set] if args.only in case.name and case.num_gpus <= args.num_gpus]
    if not cases:
        parser.error(f"--only={args.only} --num-gpus={args.num_gpus} leave no case of {args.set}")
    if args.set == "scale":
        cases = [case for case in cases for _ in range(args.num_gpus // case.num_gpus)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for num_gpus in sorted({case.num_gpus for case in cases}):
            rows += run_side_by_side([case for case in cases if case.num_gpus == num_gpus], args.num_gpus, Path(folder))
            args.out.write_text(json.dumps(rows, indent=2) + "\n")
    print_table(rows)


def run_side_by_side(cases: list[Case], num_gpus: int, folder: Path) -> list[dict[str, Any]]:
    """Runs of equal size, on as many groups of GPUs as there are; a row a case, in the order of the cases."""
    size = cases[0].num_gpus
    num_lanes = min(num_gpus // size, len(cases))
    lanes = range(num_lanes)
    with ThreadPoolExecutor(num_lanes) as pool:
        done = list(pool.map(lambda lane: run_lane(cases[lane::num_lanes], lane, folder / f"{size}-{lane}"), lanes))
    return [done[index % num_lanes][index // num_lanes] for index in range(len(cases))]


def run_lane(cases: list[Case], lane: int, folder: Path) -> list[dict[str, Any]]:
    """Runs one after another on one group of GPUs; a rank that ends a run for all is started again for the next."""
    size, rows, attempt = cases[0].num_gpus, list[dict[str, Any]](), 0
    while cases:
        work = folder / str(attempt)
        work.mkdir(parents=True)
        (work / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        port = FIRST_PORT + 200 * size + 40 * lane + 10 * attempt
        processes = [start_worker(work, lane, rank, size, port) for rank in range(size)]
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.2)
        time.sleep(0 if size == 1 else 5)  # for the other ranks to say what they saw
        for process in processes:
            process.kill()
            process.wait()
        file = work / "rows.jsonl"
        new = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        cases = cases[len(new) :]
        if cases:
            new.append({"name": cases[0].name, "failed": (work / "rank0.log").read_text()[-600:]})
        for row in new:
            print(json.dumps({key: row.get(key) for key in ("name", "seconds", "failed")}), flush=True)
        rows, cases, attempt = [*rows, *new], cases[1:], attempt + 1
    return rows


def start_worker(work: Path, lane: int, rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    """A rank of a lane, as torchrun would describe it."""
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "FIRST_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(str(lane * size + gpu) for gpu in range(size)),
        "OMP_NUM_THREADS": "4",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(work)]
    with (work / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def run_worker(folder: Path) -> None:
    """One rank: all cases of its lane, in one process, which does not outlive its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    import torch

    from qlora_fsdp.common.errors import UserError
    from qlora_fsdp.config.reading.compose import load_config
    from qlora_fsdp.config.world import World
    from qlora_fsdp.training.run import run

    rank = int(os.environ["RANK"])
    for index, values in enumerate(json.loads((folder / "cases.json").read_text())):
        case, started = Case(**values | {"overrides": tuple(values["overrides"])}), time.time()
        os.environ["MASTER_PORT"] = str(int(os.environ["FIRST_PORT"]) + index)
        row: dict[str, Any] = {"name": case.name} | asdict(case)
        if torch.cuda.is_available():
            device = int(os.environ["LOCAL_RANK"])
            row["left_gib"] = torch.cuda.memory_allocated(device) / 2**30  # of the case before: should be 0
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        try:
            row |= run(load_config(case.arguments(folder / "run")), World.from_environment(os.environ))
        except UserError as error:
            row["failed"] = str(error)
            with contextlib.suppress(OSError, ValueError):
                row["memory"] = json.loads((folder / "run" / "summary.json").read_text()).get("memory")
        row["seconds"] = round(time.time() - started, 1)
        if rank == 0:
            with (folder / "rows.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a case: GiB of tensors predicted/measured in each phase, what else there was, and speed."""
    width = max(len(row["name"]) for row in rows)
    columns = ("load", "forward", "backward", "error", "reserved", "outside", "host", "tokens/s/GPU")
    print(" " * width + "".join(f"{column:>16}" for column in columns))
    for row in rows:
        memory = row.get("memory") or {}
        plan, found = memory.get("predicted"), memory.get("measured") or {}
        if plan is None or "tensors_gib" not in found:
            print(f"{row['name']:<{width}}  {str(row.get('failed'))[-300:]}")
            continue
        tensors = found["tensors_gib"]
        cells = [
            f"{plan['tensors_gib'][p]:.2f}/{tensors.get(p, float('nan')):.2f}" for p in ("load", "forward", "backward")
        ]
        errors = [plan["tensors_gib"][p] - tensors[p] for p in ("forward", "backward") if p in tensors]
        worst = max(errors, key=abs, default=float("nan"))
        reserved = max(found["reserved_gib"].values())
        tensors_peak = max(tensors.values())
        host = f"{sum(plan['host_gib_rank_0'].values()):.1f}/{found['host_gib']:.1f}"
        cells += [f"{worst:+.2f}", f"{reserved:.2f} ({reserved - tensors_peak:+.2f})"]
        cells += [f"{plan['libraries_gib']:.2f}/{found['outside_gib']:.2f}", host]
        cells += [f"{row.get('tokens_per_second_per_gpu') or float('nan'):,.0f}"]
        what = "FAILED" if "failed" in row else plan["activations"]
        print(f"{row['name']:<{width}}" + "".join(f"{cell:>16}" for cell in cells) + f"  {what}")


if __name__ == "__main__":
    main()
