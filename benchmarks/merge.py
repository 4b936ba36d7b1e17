#!/usr/bin/env python3
"""Memory and time of a merge: a random checkpoint of a real shape and a random adapter, merged and checked.

    python benchmarks/merge.py --shape 70b --sparse --folder /data/merge

needs twice the checkpoint on the disk (all 80 layers of 70B: 2 x 141 GB), and removes the folder at the end. --sparse
makes do with a few GB: the base's layers are holes in sparse files, which read as zeros, all but the last one, the
embeddings and the head; and a full-precision result's values are taken from the disk as soon as they were checked.
Prints one line of JSON; the peak is of anonymous memory (RssAnon), without page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def run_merge(arguments: list[str], look: Callable[[], None]) -> tuple[float, float]:
    """Run it, calling `look` meanwhile; its peak of anonymous memory in GiB, and seconds."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "qlora_fsdp.merge", *arguments])
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        look()
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    look()
    return peak / 2**20, time.perf_counter() - started


class Checked:
    """The finished files of a merge: the first rows of each linear layer against base + B A alpha / r, both in bf16."""

    def __init__(self, base: Path, adapter: Path, merged: Path, drop: bool) -> None:
        self.base, self.merged, self.drop = base, merged, drop
        self.lora: Any = safe_open(adapter / "adapter_model.safetensors", "pt")
        self.files: set[str] = set()
        self.weights, self.error = 0, 0.0

    def look(self) -> None:
        """Check what is new; with `drop`, take its values from the disk: header and length stay."""
        for file in self.merged.glob("model-*.safetensors"):
            if file.name in self.files:
                continue
            self.files.add(file.name)
            with safe_open(self.base / file.name, "pt") as old, safe_open(file, "pt") as new:
                for key in new.keys():  # noqa: SIM118
                    if key.endswith("proj.weight"):
                        self._check(key, *(stored.get_slice(key)[:ROWS].float() for stored in (old, new)))
            if self.drop:
                with file.open("rb") as stream:
                    header = 8 + int.from_bytes(stream.read(8), "little")
                length = str(file.stat().st_size - header)
                subprocess.run(
                    ["fallocate", "--punch-hole", "--offset", str(header), "--length", length, file], check=True
                )

    def _check(self, key: str, weight: Tensor, result: Tensor) -> None:
        name = f"base_model.model.{key.removesuffix('.weight')}"
        b, a = self.lora.get_slice(f"{name}.lora_B.weight")[:ROWS], self.lora.get_tensor(f"{name}.lora_A.weight")
        expected = (weight + b @ a * (ALPHA / RANK)).bfloat16().float()
        self.weights, self.error = self.weights + 1, max(self.error, float((result - expected).abs().max()))


def main() -> None:
    """Make, merge, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="70b")
    parser.add_argument("--layers", type=int, default=None, help="of the shape's (default: all)")
    parser.add_argument("--base", choices=("full", "dequantized"), default="full")
    parser.add_argument("--quantize", choices=("nf4", "fp4"))
    parser.add_argument("--sparse", action="store_true", help="holes in place of values, see above")
    parser.add_argument("--folder", type=Path, required=True, help="a new one")
    wanted = parser.parse_args()
    base, adapter, merged = (wanted.folder.resolve() / name for name in ("base", "adapter", "merged"))
    make_checkpoint(wanted.shape, base, wanted.layers, wanted.sparse)
    make_adapter(base, adapter)
    is_plain = wanted.base == "full" and wanted.quantize is None
    checked = Checked(base, adapter, merged, wanted.sparse)
    kind = [f"base={wanted.base}"] + [f"quantize={wanted.quantize}"] * (wanted.quantize is not None)
    try:
        arguments = [f"adapter={adapter}", f"out={merged}", *kind]
        peak, seconds = run_merge(arguments, checked.look if is_plain else lambda: None)
        sizes = [file.stat().st_size / 2**30 for file in merged.glob("*.safetensors")]
        figures = {"anonymous_peak_gib": peak, "seconds": seconds, "gib": sum(sizes), "largest_file_gib": max(sizes)}
        rounded = {name: round(value, 3) for name, value in figures.items()}
        error = {"weights_checked": checked.weights, "error": checked.error} if is_plain else {}
        print(json.dumps({"shape": wanted.shape, "layers": wanted.layers, "kind": kind, **rounded, **error}))
    finally:
        shutil.rmtree(wanted.folder)


if __name__ == "__main__":
    main()
