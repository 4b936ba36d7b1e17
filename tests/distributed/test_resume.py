"""A run that is stopped and goes on is the run that never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest

from qlora_fsdp.records.run_state import checkpoint_folders
from tests.cli.launch import SHORT_STEPS, Launch
from tests.helpers.lines import read_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import RanksFailed, once, run_ranks
from tests.helpers.runs import Trained, settings, train_all, train_here

pytestmark = pytest.mark.distributed
ADAPTER = Path("adapter/adapter_model.safetensors")
NUM_STEPS, STEP = 6, 4  # checkpoints after 2 and 4

# Settings whose runs must go on bit for bit, on 2 ranks.
EXACT = {
    "dropout, accumulation, evaluation, layers stay gathered": [
        *(
            "fsdp.reshard_after_forward=false",
            "lora.lora_dropout=0.3",
            "training.global_batch_size=8",
            "training.max_length=128",
        ),
        *("data.eval_fraction=0.1", "training.eval_every_steps=2", "optim.lr_scheduler_type=cosine"),
    ],
    "padded, second epoch": ["training.packing=false", "data.max_rows=18"],
    "a rank without rows": ["lora.r=1"],
    "offload, started from the rounding's error": ["fsdp=offload", "lora.init_lora_weights=loftq"],
    "no_shard": ["fsdp=no_shard"],
    "deterministic": ["training.deterministic=true", "training.global_batch_size=8"],
    "adamw_8bit": ["optim=adamw_8bit", "lora.r=64"],
    "lion_8bit": ["optim=lion_8bit", "lora.r=64"],
    "adafactor": ["optim=adafactor", "lora.use_dora=true"],
}


def checkpoint_of(folder: Path, step: int) -> str:
    return f"checkpoint.resume={folder / 'checkpoints' / f'step-{step:08}'}"


def figures(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl about steps and evaluations, without what depends on the clock."""
    lines = read_lines(folder / "metrics.jsonl")
    keys = ("step", "epoch", "loss", "grad_norm", "eval_loss")
    return [{key: line.get(key) for key in keys} for line in lines if "checkpoint_seconds" not in line]


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Callable[..., Path], rows: Path, tmp_path_factory: pytest.TempPathFactory):
    """Every case straight through and resumed: its folder, and losses by (case, 'straight' or 'resumed')."""
    folder = tmp_path_factory.mktemp("exact")
    cases: dict[tuple[str, str], list[str]] = {}
    for index, (case, more) in enumerate(EXACT.items()):
        common = settings(checkpoint("llama"), rows, f"training.max_steps={NUM_STEPS}", *more)
        straight, resumed = folder / f"{index}-straight", folder / f"{index}-resumed"
        cases[case, "straight"] = [*common, f"run.folder={straight}", "checkpoint.every_steps=2"]
        cases[case, "resumed"] = [*common, f"run.folder={resumed}", checkpoint_of(straight, STEP)]

    @once
    def run() -> dict[tuple[str, str], Trained]:
        return run_ranks(2, train_all, cases)[0]

    return folder, run


@pytest.mark.parametrize("case", EXACT)
def test_resumed_run_is_the_same_bit_for_bit(two_ranks, case: str):
    folder, run = two_ranks
    straight, resumed = run()[case, "straight"], run()[case, "resumed"]
    assert len(straight.losses) == NUM_STEPS and resumed.losses == straight.losses[STEP:]
    index = list(EXACT).index(case)
    folders = [folder / f"{index}-{kind}" for kind in ("straight", "resumed")]
    assert (folders[0] / ADAPTER).read_bytes() == (folders[1] / ADAPTER).read_bytes()
    lines = [line for line in figures(folders[0]) if line["step"] > STEP or (line["step"] == STEP and not line["loss"])]
    assert figures(folders[1]) == lines
    summaries = [json.loads((f / "summary.json").read_text()) for f in folders]
    # final_loss is a mean over the steps in this folder's metrics.jsonl, which the resumed run has only a part of.
    for key in ("status", "steps", "initial_eval_loss", "eval_loss"):
        assert summaries[0][key] == summaries[1][key]


def test_checkpoint_has_an_adapter_that_peft_loads(two_ranks):
    folder, run = two_ranks
    run()
    found = checkpoint_folders(folder / "0-straight" / "checkpoints")
    assert [path.name for path in found] == ["step-00000002", "step-00000004"]
    assert peft.PeftConfig.from_pretrained(found[-1] / "adapter").r == 8
    assert (found[-1] / "adapter" / ADAPTER.name).read_bytes() != (found[0] / "adapter" / ADAPTER.name).read_bytes()


def test_other_numbers_of_ranks(checkpoint: Callable[..., Path], rows: Path, tmp_path: Path):
    plain = settings(checkpoint("llama"), rows, "training.max_steps=6", "training.global_batch_size=6")
    common = [text for text in plain if not text.startswith("fsdp=")]
    losses = {}
    parts = ((2, 0, None, "no_shard"), (3, 2, 2, "full_shard"), (1, 4, 3, "auto"))  # a checkpoint fits any sharding
    for num_ranks, first, before, sharding in parts:
        argv = [*common, f"fsdp={sharding}", f"run.folder={tmp_path / str(num_ranks)}", "checkpoint.every_steps=2"]
        argv += [checkpoint_of(tmp_path / str(before), first)] if before else []
        losses[num_ranks] = run_ranks(num_ranks, train_all, {"run": argv})[0]["run"].losses
    pieces, straight = losses[2][:2] + losses[3][:2] + losses[1], losses[2]
    assert pieces == pytest.approx(straight, abs=1e-5)


def train_and_die(argv: list[str], seed: int) -> None:
    """Train until some moment after a checkpoint has been written, most likely in the middle of writing the next."""
    folder = Path(load_config(argv).run.folder) / "checkpoints"
    before = checkpoint_folders(folder)[-1:]

    def die() -> None:
        while checkpoint_folders(folder)[-1:] == before:
            time.sleep(0.01)
        time.sleep(random.Random(seed + int(os.environ["RANK"])).uniform(0, 0.4))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    train_here(argv)


@pytest.mark.slow
def test_kills_at_random_moments(checkpoint: Callable[..., Path], rows: Path, tmp_path: Path):
    """Two ranks are killed again and again, mostly while they save, and end with the adapter of an undisturbed run."""
    common = settings(checkpoint("llama"), rows, "training.max_steps=30", "lora.lora_dropout=0.1")
    straight, stopped = ([*common, f"run.folder={tmp_path / name}"] for name in ("straight", "stopped"))
    stopped += ["checkpoint.every_steps=1", "run.overwrite=false"]
    steps = []
    for seed in range(0, 50, 10):
        with pytest.raises(RanksFailed, match="died without a word"):
            run_ranks(2, train_and_die, stopped, seed)
        steps.append(int(checkpoint_folders(tmp_path / "stopped" / "checkpoints")[-1].name.removeprefix("step-")))
    assert steps == sorted(set(steps)) and steps[-1] < 30, "each goes on from where the last got"
    run_ranks(2, train_all, {"straight": straight, "stopped": stopped})
    assert (tmp_path / "stopped" / ADAPTER).read_bytes() == (tmp_path / "straight" / ADAPTER).read_bytes()
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")
    assert len(list((tmp_path / "stopped" / "checkpoints").iterdir())) == 2, "keep_last, and nothing unfinished"


@pytest.mark.slow
def test_max_restarts_of_the_launcher_goes_on(tmp_path: Path):
    """A rank is killed; accelerate starts all again; run.overwrite, which began the run, does not begin it anew."""
    argv = ["model=tiny", "data=random", "training.max_length=64", "training.max_steps=40", "checkpoint.every_steps=5"]
    argv += SHORT_STEPS
    launch = Launch(tmp_path, "accelerate with a restart", *argv, "run.overwrite=true")
    folder = launch.run_folder / "checkpoints"
    launch.wait_for(lambda: len(checkpoint_folders(folder)) > 1, "checkpoints")
    launch.rank(1).kill()
    assert launch.finish() == 0, launch.output
    assert "rank 1 is gone" in launch.output and "Going on from step " in launch.output
    assert [line["step"] for line in figures(launch.run_folder)] == list(range(1, 41)), "no step is done twice"
    assert launch.summary["status"] == "finished"
