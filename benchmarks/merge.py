#!/usr/bin/env python3
"""Memory and time of a merge: a random checkpoint of a real shape and a random adapter, merged and checked.

    python benchmarks/merge.py --shape 70b --layers 4 --base full --folder /data/merge

needs twice the checkpoint on the disk (a 70B layer is 1.7 GB, embeddings and head 2.1 GB each; all 80: 2 x 141 GB), and
removes the folder at the end. Prints one line of JSON; the peak is of anonymous memory (RssAnon), without page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from make_checkpoint import SHAPES
from make_checkpoint import main as make_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

RANK, ALPHA = 16, 32
ROWS = 64  # of each checked weight


def make_adapter(base: Path, out: Path) -> None:
    """A random LoRA adapter of every linear layer of `base`, as PEFT writes it."""
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118
                if key.endswith("proj.weight"):
                    rows, columns = stored.get_slice(key).get_shape()
                    name = f"base_model.model.{key.removesuffix('.weight')}"
                    tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.02
                    tensors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.02
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    config["base_model_name_or_path"] = str(base)
    (out / "adapter_config.json").write_text(json.dumps(config))


def run_merge(arguments: list[str]) -> tuple[float, float]:
    """Run it; its peak of anonymous memory in GiB, and seconds."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "qlora_fsdp.merge", *arguments])
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak / 2**20, time.perf_counter() - started


def largest_error(base: Path, adapter: Path, merged: Path) -> float:
    """Of the first rows of the last layer's weights: merged against base + B A alpha / r, both in bf16."""
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    keys = sorted(key for key in index if key.endswith("proj.weight"))[-7:]
    worst = 0.0
    with safe_open(adapter / "adapter_model.safetensors", "pt") as lora:
        for key in keys:
            name = f"base_model.model.{key.removesuffix('.weight')}"
            with safe_open(base / index[key], "pt") as old, safe_open(merged / index[key], "pt") as new:
                weight, result = (file.get_slice(key)[:ROWS].float() for file in (old, new))
            b, a = lora.get_slice(f"{name}.lora_B.weight")[:ROWS], lora.get_tensor(f"{name}.lora_A.weight")
            expected = (weight + b @ a * (ALPHA / RANK)).bfloat16().float()
            worst = max(worst, float((result - expected).abs().max()))
    return worst


def main() -> None:
    """Make, merge, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="70b")
    parser.add_argument("--layers", type=int, default=None, help="of the shape's (default: all)")
    parser.add_argument("--base", choices=("full", "dequantized"), default="full")
    parser.add_argument("--folder", type=Path, required=True, help="a new one")
    wanted = parser.parse_args()
    base, adapter, merged = (wanted.folder.resolve() / name for name in ("base", "adapter", "merged"))
    make_checkpoint(wanted.shape, base, wanted.layers)
    make_adapter(base, adapter)
    try:
        peak, seconds = run_merge([f"adapter={adapter}", f"out={merged}", f"base={wanted.base}"])
        error = largest_error(base, adapter, merged) if wanted.base == "full" else None
        size = sum(file.stat().st_size for file in merged.glob("*.safetensors")) / 2**30
        largest = max(file.stat().st_size for file in merged.glob("*.safetensors")) / 2**30
        figures = {"anonymous_peak_gib": peak, "seconds": seconds, "gib": size, "largest_file_gib": largest}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(
            json.dumps({"shape": wanted.shape, "layers": wanted.layers, "base": wanted.base, **rounded, "error": error})
        )
    finally:
        shutil.rmtree(wanted.folder)


if __name__ == "__main__":
    main()
