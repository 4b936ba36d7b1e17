#!/usr/bin/env python3
r"""A run that is killed again and again must end with the adapter of a run that was never stopped.

    python benchmarks/soak.py --kills 30 --folder /tmp/soak --out soak.json

Two ranks on the CPU, started by torchrun as a user would. Each attempt is killed (SIGKILL) at a random moment after it
has written a checkpoint of its own, every other time while it writes the next: one rank, after which torchrun ends the
others, or all processes at once. After each kill every checkpoint in the run folder is read and compared with its
checksums; then the same command goes on. Prints a line a kill and writes JSON; the exit code is 1 if the adapters
differ or a checkpoint is damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from qlora_fsdp.common.files import digest_file
from qlora_fsdp.records.run_state import checkpoint_folders
from qlora_fsdp.training.checkpoints.checkpoint import read_manifest

SETTINGS = (
    *("model=tiny", "data=random", "data.max_rows=64", "data.eval_fraction=0.1", "training.eval_every_steps=50"),
    *("training.max_length=64", "training.global_batch_size=4", "lora.lora_dropout=0.1", "lora.r=64"),
)
ADAPTER = Path("adapter/adapter_model.safetensors")
MAX_SECONDS = 600  # for an attempt to write a checkpoint, or for a run to end


def main() -> int:
    """Run straight, run with kills, compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3000, help="of the run, which all kills must fall into")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    common = [*SETTINGS, f"training.max_steps={options.steps}"]
    straight, killed = options.folder / "straight", options.folder / "killed"
    finish(start(straight, *common, "run.overwrite=true"))
    rng, kills = random.Random(options.seed), []
    command = [*common, f"checkpoint.every_steps={options.every}"]
    for number in range(1, options.kills + 1):
        kills.append(kill_once(start(killed, *command), killed, rng) | {"number": number})
        print(json.dumps(kills[-1]), flush=True)
    finish(start(killed, *command))
    digests = [hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest() for folder in (straight, killed)]
    result = {
        "kills": kills,
        "num_kills": len(kills),
        "num_while_saving": sum(kill["was_saving"] for kill in kills),
        "num_unreadable": sum(kill["num_unreadable"] for kill in kills),
        "is_identical": digests[0] == digests[1],
        "steps_done_twice": sum(kill["died_at"] - kill["saved"] for kill in kills),
        "checkpoints": json.loads((killed / "summary.json").read_text())["checkpoints"],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "kills"}))
    return 0 if result["is_identical"] and not result["num_unreadable"] else 1


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a run of two ranks; its output goes to the folder's console.log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "qlora_fsdp.train"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "console.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command, f"run.folder={folder}", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_once(process: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> dict[str, Any]:
    """Kill one rank or all at a random moment after the first new checkpoint; what was found then."""
    checkpoints, started = folder / "checkpoints", time.monotonic()
    before = {path.name for path in checkpoint_folders(checkpoints)}
    while not {path.name for path in checkpoint_folders(checkpoints)} - before:
        time.sleep(0.01)
        if process.poll() is not None or time.monotonic() - started > MAX_SECONDS:
            raise SystemExit(f"No new checkpoint; see {folder / 'console.log'}")
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if "RANK" in child.environ()]
    victim, seeks_save = rng.choice(["rank 0", "rank 1", "all"]), rng.random() < 0.5
    if seeks_save:
        while not any(checkpoints.glob(".step-*.tmp")) and process.poll() is None:
            time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.15 if seeks_save else 1.0))
    victims = [rank for rank in ranks if rank.environ()["RANK"] == victim[-1]]
    if victim == "all":
        victims = [psutil.Process(process.pid), *children]
    for each in victims:
        each.suspend()  # so that all end at one moment
    was_saving = any(checkpoints.glob(".step-*.tmp"))
    for each in victims:
        each.kill()
    finish(process, expect_success=False)
    found = checkpoint_folders(checkpoints)
    return {
        "killed": victim,
        "seconds": round(time.monotonic() - started, 1),
        "was_saving": was_saving,
        "saved": read_manifest(found[-1]).step,
        "died_at": last_step(folder),
        "num_checkpoints": len(found),
        "num_unreadable": sum(not is_whole(path) for path in found),
    }


def finish(process: subprocess.Popen[bytes], expect_success: bool = True) -> None:
    """Wait for the end of a run."""
    code = process.wait(MAX_SECONDS * 3)
    if expect_success and code != 0:
        raise SystemExit(f"A run ended with {code}: {process.args!r}")


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is as its manifest says."""
    files = read_manifest(folder).files
    return all(
        (folder / name).stat().st_size == size and digest_file(folder / name) == digest
        for name, (size, digest) in files.items()
    )


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl."""
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return max(int(json.loads(line)["step"]) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
