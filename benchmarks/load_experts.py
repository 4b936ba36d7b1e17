#!/usr/bin/env python3
r"""Seconds to load a mixture of experts out of the page cache, stored as on the hub: a tensor for each expert's matrix.

    python benchmarks/load_experts.py --model qwen3-30b-a3b --num-gpus 2

The files are sparse and hold zeros, so they take no disk. The first run reads them into the page cache, and the others
are measured. A run goes on to its first step, and ends there with an error, because zeros have no gradient.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from make_checkpoint import write_hole, write_tokenizer
from transformers import AutoModelForCausalLM, PretrainedConfig

from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.model.find import make_config

GIB = 2**30


def main() -> None:
    """Write the files, load them, and print a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset whose experts are gated")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    preset = load_config([f"model={args.model}", "data=random"]).model
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        size = write_model(make_config(preset.config, args.model), base)
        for number in range(args.runs):
            seconds = load(base, Path(folder) / f"run{number}", args.num_gpus)
            print(f"{size / GIB:.1f} GiB on {args.num_gpus} GPUs, run {number}: loaded in {seconds:.2f} s", flush=True)


def write_model(config: PretrainedConfig, base: Path) -> int:
    """A model folder with a file for each layer; the bytes of its weights."""
    base.mkdir()
    config.dtype = torch.bfloat16
    config.save_pretrained(base)
    write_tokenizer(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, list[int]]] = {}
    for name, tensor in model.state_dict().items():
        layer = re.search(r"layers\.(\d+)\.", name)
        tensors = stored(name, tensor.shape)
        if config.model_type == "gpt_oss":  # whose experts are fused on the hub too
            tensors = iter([(name, list(tensor.shape))])
        files.setdefault(f"model-{layer[1] if layer else 'ends'}.safetensors", {}).update(tensors)
    for file, shapes in files.items():
        write_hole(base / file, shapes)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * torch.Size(shape).numel() for shapes in files.values() for shape in shapes.values())


def stored(name: str, shape: torch.Size) -> Iterator[tuple[str, list[int]]]:
    """A parameter's tensors on the hub: of fused experts one for each expert and matrix."""
    prefix, _, last = name.rpartition(".")
    match last:
        case "gate_up_proj":
            num_experts, rows, columns = shape
            parts = {"gate_proj": [rows // 2, columns], "up_proj": [rows // 2, columns]}
        case "down_proj":
            num_experts, *matrix = shape
            parts = {"down_proj": matrix}
        case _:
            yield name, list(shape)
            return
    for expert in range(num_experts):
        yield from ((f"{prefix}.{expert}.{part}.weight", size) for part, size in parts.items())


def load(base: Path, folder: Path, num_gpus: int) -> float:
    """What a run says of its loading."""
    train = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_gpus), "-m", "qlora_fsdp.train"]
    overrides = [f"model.path={base}", "data=random", f"run.folder={folder}", "training.max_steps=1"]
    overrides += ["training.max_length=512", "training.micro_batch_size=1", "training.global_batch_size=null"]
    command = [sys.executable, *train, *overrides, "fsdp.sharding_strategy=FULL_SHARD"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    file = folder / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {}
    assert "load_seconds" in summary, done.stderr
    return float(summary["load_seconds"])


if __name__ == "__main__":
    main()
