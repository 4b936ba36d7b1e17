#!/usr/bin/env bash
# How long training waits for a checkpoint, how long it is written, and how long going on from one takes beside loading.
#
#   MODEL=llama3-70b GPUS=2 FOLDER=/tmp/checkpoints benchmarks/checkpoints.sh [setting=value ...]
#
# Random weights and data. Prints summary.json's figures of a run with three checkpoints and of one that goes on from
# the last of them, the seconds of each step (those after 4, 8 and 12 have a checkpoint written beside them), and sizes.
set -euo pipefail
model=${MODEL:-llama3-70b} gpus=${GPUS:-2} folder=${FOLDER:-/tmp/checkpoints}
first=$folder/first resumed=$folder/resumed
mkdir -p "$folder"

run() {
  python -m torch.distributed.run --standalone --nproc_per_node "$gpus" -m qlora_fsdp.train experiment=dry_run \
    "model=$model" training.max_steps=13 checkpoint.every_steps=4 run.overwrite=true "$@" >"$folder/console.log" 2>&1 ||
    { tail -20 "$folder/console.log"; exit 1; }
}

show() {
  python - "$1" <<'PYTHON'
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
summary = json.loads((folder / "summary.json").read_text())
keys = ("status", "setup_seconds", "load_seconds", "proof_seconds", "resume_seconds", "checkpoints")
print(folder.name, {key: summary[key] for key in keys if key in summary})
lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
print("  seconds by step:", {line["step"]: line["seconds"] for line in lines if "loss" in line})
for line in lines:
    if "checkpoint_seconds" in line:
        print(f"  step {line['step']}: waited {line['checkpoint_stall_seconds']} s, written {line['checkpoint_seconds']} s")
PYTHON
}

run "run.folder=$first" "$@"
show "$first"
run "run.folder=$resumed" "checkpoint.resume=$first/checkpoints/step-00000012" "$@"
show "$resumed"
du -sh "$first"/checkpoints/*
