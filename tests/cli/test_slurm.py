"""On a real SLURM of two nodes (tests/helpers/slurm/start.sh): preemption, resumption, arrays, plain scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_fsdp.records.run_state import read_json, slurm_queue
from qlora_fsdp.status import show_status
from tests.cli.launch import ROOT, SHORT_STEPS, child_environment
from tests.helpers.lines import read_lines

NUM_NODES = 2


def has_slurm() -> bool:
    if shutil.which("sbatch") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0


pytestmark = [pytest.mark.distributed, pytest.mark.slow]
BASE = ["model=tiny", "data=random", "training.max_length=64", *SHORT_STEPS]
SWEEP = [
    *("-m", "hydra/launcher=slurm", "run.folder=sweep", "lora.r=2,4", "training.seed=0,1"),
    "training.max_steps=2",
]


def run(folder: Path, *command: str) -> str:
    own = child_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *arguments: str) -> str:
    return run(folder, sys.executable, "-m", "qlora_fsdp.train", *BASE, *arguments)


def wait_for(condition: Callable[[], Any], what: str, folder: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or (not slurm_queue() and not condition()):
            logs = [f"{file}:\n{file.read_text()}" for file in folder.rglob("*") if file.suffix in (".out", ".log")]
            raise AssertionError(f"{what}: not so within {seconds:.0f} s.\n{slurm_queue()}\n" + "\n".join(logs))
        time.sleep(0.5)


def lines_of(job: Path) -> list[dict[str, Any]]:
    return read_lines(job / "metrics.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All jobs are submitted at once; they end while the tests wait for the one or the other."""
    if not has_slurm():  # asked here, not by each worker as it starts: one that is down answers after 9 seconds
        pytest.skip("no SLURM here: tests/helpers/slurm/start.sh starts one")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("accelerate_configs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    preempted = ["hydra/launcher=slurm", "run.folder=preempted", f"slurm.nodes={NUM_NODES}", "run.overwrite=true"]
    train(folder, *preempted, "training.max_steps=100000", "checkpoint.allow_changes=[training.max_steps]")
    train(folder, *SWEEP, "launch.parallel=2")
    run(folder, "sbatch", "scripts/train_one_node.sbatch", *BASE, "training.max_steps=1", "run.folder=one")
    nodes = f"--nodes={NUM_NODES}"
    run(folder, "sbatch", nodes, "scripts/train_many_nodes.sbatch", *BASE, "training.max_steps=1", "run.folder=many")
    yield folder
    subprocess.run(["scancel", "--me"], check=False)


def test_preempted_run_queues_again_and_goes_on(folder: Path) -> None:
    job = folder / "preempted"
    number = json.loads((job / "slurm.json").read_text())["job_id"]
    wait_for(lambda: len(lines_of(job)) > 1, "steps", folder)
    assert f"{NUM_NODES} ranks" in (job / "train.log").read_text()
    run(folder, "scancel", "--signal=USR1", "--batch", number)
    wait_for(lambda: read_json(job / "summary.json").get("status") == "interrupted", "a checkpoint", folder)
    saved = int(read_json(job / "summary.json")["error"].split()[4])
    wait_for(lambda: len(lines_of(job)) > saved + 1, "steps after the requeue", folder)
    assert f"Going on from step {saved}," in (job / "train.log").read_text()
    assert [line["step"] for line in lines_of(job)][: saved + 1] == list(range(1, saved + 2)), "no step is done twice"
    assert "Restarts=1" in run(folder, "scontrol", "show", "job", number)
    run(folder, "scancel", number)
    wait_for(lambda: number not in slurm_queue(), "an end", folder)
    assert "Interrupted by SIGTERM. Step " in read_json(job / "summary.json")["error"], "it saves"


def test_sweep_is_one_array_job(folder: Path) -> None:
    jobs = [folder / "sweep" / f"lora.r={r}__training.seed={seed}" for r in (2, 4) for seed in (0, 1)]
    numbers = [json.loads((job / "slurm.json").read_text())["job_id"] for job in jobs]
    assert [number.partition("_")[2] for number in numbers] == ["0", "1", "2", "3"]
    assert len({number.partition("_")[0] for number in numbers}) == 1
    wait_for(lambda: all((job / "adapter").exists() for job in jobs), "4 adapters", folder)
    wait_for(lambda: not set(numbers) & set(slurm_queue()), "an empty queue", folder)
    assert show_status([folder / "sweep"]).count(" finished ") == 4
    assert "4 of 4 jobs have finished before." in train(folder, *SWEEP)


@pytest.mark.parametrize("name", ["one", "many"])
def test_plain_script_trains(folder: Path, name: str) -> None:
    wait_for(lambda: (folder / name / "adapter").exists(), "an adapter", folder)
    assert (f"{NUM_NODES} ranks on" if name == "many" else "1 rank on") in (folder / name / "train.log").read_text()
