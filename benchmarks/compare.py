#!/usr/bin/env python3
r"""This project beside TRL's recipe, on the same random checkpoint, in the same job, in turn.

    python benchmarks/compare.py --shape 8b --num-gpus 2 --max-length 4096 --micro-batch-size 4 \
        --sides ours,ours:memory=keep,trl-fsdp2-liger

A side is `ours`, with overrides behind colons, or `trl-fsdp1`, `trl-fsdp2`, `trl-ddp`, with `-keep` behind it for
activations that are kept and `-liger` for its fused kernels. With `--task dpo` a micro-batch is of pairs, of
`--max-length` tokens a side, and `reference_s` are the seconds of the reference's pass before the first step. Prints a
row a side and writes JSON. Speed is the median step after the second; memory the most that tensors held on any GPU;
MFU the model's FLOPs, without recomputation, over the bf16 matrix rate measured on this host before the sides run; and
the ratio is to the fastest side of TRL. `to_first_step_s` counts from the end of the imports,
`launch_to_first_row_s` from the command itself, imports of torch included, to the first step's line in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "trl", "liger-kernel")


def main() -> None:
    """Run all sides in turn; print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--shape", choices=["tiny", "8b", "70b"], default="8b")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sides", default="ours,trl-fsdp1")
    parser.add_argument("--cap-gib", type=float, help="hold every GPU's tensors to this, on both sides")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all sides")
    parser.add_argument("--checkpoint", type=Path, help="a folder to keep the checkpoint in")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    args = parser.parse_args()
    checkpoint = args.checkpoint or Path(tempfile.gettempdir()) / f"random-{args.shape}"
    if not (checkpoint / "model.safetensors.index.json").is_file():
        subprocess.run([sys.executable, HERE / "make_checkpoint.py", args.shape, checkpoint], check=True)
    matrix_rate = measure_matrix_rate()
    rows = [run_side(side, args, checkpoint) for _ in range(args.repeats) for side in args.sides.split(",")]
    add_ratios(rows, matrix_rate)
    print_table(rows)
    environment = {
        "matrix_tflops": matrix_rate,
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{args.num_gpus} x {gpu_name()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in PACKAGES},
        "command": shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
    }
    args.out.write_text(json.dumps(environment | {"rows": rows}, indent=2) + "\n")


def run_side(side: str, args: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """One side, once: its figures, or how it failed."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run = run_ours if side.startswith("ours") else run_trl
        figures = run(side, args, checkpoint, Path(folder))
    print(f"{side}: {figures}", flush=True)
    return {"side": side, "total_seconds": round(time.time() - started, 1)} | figures


def run_ours(side: str, args: argparse.Namespace, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """This project's figures, from what the run wrote into its folder."""
    overrides = side.split(":")[1:]
    command = [
        *("accelerate", "launch", *launch_options(args), "-m", "qlora_fsdp.train"),
        *(f"model.path={checkpoint}", "data=random", f"run.folder={folder}/run"),
        *(f"training.max_length={args.max_length}", f"training.micro_batch_size={args.micro_batch_size}"),
        *("training.global_batch_size=null", "fsdp.sharding_strategy=FULL_SHARD"),
        *(["task=preference"] if args.task == "dpo" else []),
        *(f"training.max_steps={args.steps}", "optim.lr_scheduler_type=constant", *overrides),
        *([f"memory.target_gib={args.cap_gib:g}"] if args.cap_gib else []),
    ]
    log, first_row_s = launch(command, folder / "run" / "metrics.jsonl")
    try:
        summary = json.loads((folder / "run" / "summary.json").read_text())
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return {"failed": log[-400:]}
    if summary["status"] != "finished":
        return {"failed": summary.get("error", log[-400:])}
    step_seconds = sorted(step["seconds"] for step in steps[2:])[len(steps[2:]) // 2]
    reference = re.search(r"Reference: .* computed in ([\d.]+) s", (folder / "run" / "train.log").read_text())
    return {
        "load_s": round(summary["load_seconds"], 2),
        "to_first_step_s": round(summary["setup_seconds"], 1),
        "launch_to_first_row_s": first_row_s,
        "load_peak_gib": round(summary["load_gpu_peak_gib"] or 0.0, 2),
        "peak_gib": round(summary["step_gpu_peak_gib"] or 0.0, 2),
        "host_gib": round(steps[-1]["host_rss_gib"], 1),
        "step_s": round(step_seconds, 3),
        "reference_s": float(reference[1]) if reference else None,
        "tokens_s_gpu": round(tokens_of(args) / step_seconds),
        "datasheet_mfu": steps[-1]["mfu"],
        "losses": [round(step["loss"], 4) for step in steps],
    }


def run_trl(side: str, args: argparse.Namespace, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """TRL's figures, from the line that trl_sft.py prints on each rank."""
    import torch

    _, way, *more = side.split("-")
    config = [] if way == "ddp" else ["--config_file", str(HERE / f"{way}.yaml")]
    command = [
        *("accelerate", "launch", *config, *launch_options(args), str(HERE / "trl_sft.py"), "--task", args.task),
        *("--model", str(checkpoint), "--seq", str(args.max_length), "--mbs", str(args.micro_batch_size)),
        *("--steps", str(args.steps), *(["--liger"] if "liger" in more else [])),
        *(["--no-checkpointing"] if "keep" in more else []),
        *([] if torch.cuda.is_available() else ["--cpu"]),
        *(["--cap", str(args.cap_gib)] if args.cap_gib else []),
    ]
    log, _ = launch(command)
    results = [json.loads(found) for found in re.findall(r"RESULT (\{[^{}]*\})", log)]
    if not results:
        errors = [line for line in log.splitlines() if "Error: " in line]
        return {"failed": errors[0] if errors else log[-400:]}
    first = min(results, key=lambda result: result["rank"])
    return {
        "load_s": max(r["load_s"] for r in results),
        "to_first_step_s": first["to_first_step_s"],
        "load_peak_gib": max(r["load_peak_gib"] for r in results),
        "peak_gib": max(r["training_peak_gib"] for r in results),
        "host_gib": max(r["host_rss_gib"] for r in results),
        "step_s": first["step_s"],
        "reference_s": first["reference_s"],
        "tokens_s_gpu": first["tokens_s_gpu"],
        "datasheet_mfu": None,
        "losses": first["losses"],
    }


def tokens_of(args: argparse.Namespace) -> int:
    """Tokens of a rank's micro-batch; of pairs on both sides."""
    return int(args.max_length * args.micro_batch_size) * (2 if args.task == "dpo" else 1)


def measure_matrix_rate() -> float | None:
    """TFLOP/s of a large bf16 product on the first GPU, in a process that leaves nothing there; None without one."""
    code = (
        "import torch, time\n"
        "a, b = (torch.randn(8192, 8192, device='cuda').bfloat16() for _ in range(2))\n"
        "for n in (20, 200):\n"
        "    torch.cuda.synchronize(); start = time.perf_counter()\n"
        "    for _ in range(n): a @ b\n"
        "    torch.cuda.synchronize(); seconds = time.perf_counter() - start\n"
        "print(2 * 8192**3 * n / seconds / 1e12)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return round(float(done.stdout), 1) if done.returncode == 0 else None


def add_ratios(rows: list[dict[str, Any]], matrix_rate: float | None) -> None:
    """MFU over the measured rate for the sides that count FLOPs, and every side's speed over TRL's best."""
    import torch

    from qlora_fsdp.runtime.hardware import peak_flops

    peak = peak_flops(torch.device("cuda", 0)) if matrix_rate else None
    peers = [row["tokens_s_gpu"] for row in rows if row["side"].startswith("trl") and "failed" not in row]
    for row in (row for row in rows if "failed" not in row):
        if row["datasheet_mfu"] and matrix_rate and peak:
            row["mfu"] = round(row["datasheet_mfu"] * peak / 1e12 / matrix_rate, 3)
        if peers:
            row["ratio"] = round(row["tokens_s_gpu"] / max(peers), 2)


def launch_options(args: argparse.Namespace) -> list[str]:
    """What `accelerate launch` needs to start a process a GPU."""
    options = ["--num_processes", str(args.num_gpus), "--main_process_port", "0"]  # any free port
    return [*options, *(["--multi_gpu"] if args.num_gpus > 1 else [])]


def launch(command: list[str], file: Path | None = None) -> tuple[str, float | None]:
    """Run a command to its end, however it ends; all it printed, and the seconds until `file` had something in it."""
    started, seconds = time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if seconds is None and file is not None and file.is_file() and file.stat().st_size:
                seconds = round(time.perf_counter() - started, 1)
            time.sleep(0.1)
        output.seek(0)
        return output.read(), seconds


def gpu_name() -> str:
    """Name of the first GPU, or `CPU`."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a side; of a side that failed, its error."""
    columns = ["load_s", "load_peak_gib", "launch_to_first_row_s", "reference_s"]
    columns += ["step_s", "tokens_s_gpu", "ratio", "mfu", "peak_gib"]
    width = max(len(row["side"]) for row in rows)
    print(" " * width + "".join(f"{column:>22}" for column in columns))
    for row in rows:
        cells = "".join(f"{row.get(column, '-')!s:>22}" for column in columns)
        print(f"{row['side']:<{width}}{cells}" if "failed" not in row else f"{row['side']}: {row['failed']}")


if __name__ == "__main__":
    main()
