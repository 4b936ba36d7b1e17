"""`training.deterministic=true` on GPUs: a run repeats to the bit, and goes on to the bit from a checkpoint.

Rows are some hundred tokens long: attention's backward adds in any order only where a row has several blocks of keys.
Every case is trained straight through, again, launched kernel by kernel, and from the checkpoint in its middle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.records.run_state import checkpoint_folders
from tests.helpers.experts import make_experts
from tests.helpers.lines import read_lines
from tests.helpers.preferences import write_pairs
from tests.helpers.ranks import RanksFailed, once, run_ranks
from tests.helpers.runs import WORDS, settings, train_all, train_here

NUM_RANKS = torch.cuda.device_count()
NUM_STEPS, STEP = 12, 6
MAX_LENGTH = 1024
NUM_LONG = 200  # steps of the run that is killed, soon after its fifth
ADAPTER = Path("adapter/adapter_model.safetensors")
RECORDED = "recorded as a CUDA graph for"
RESUMED = f"checkpoints/step-{STEP:08}"
RUNS: dict[str, list[str]] = {"straight": [], "again": [], "launched": ["compute.cuda_graph=false"], "resumed": []}
PAIRS = ["task=preference", "data.path=PAIRS", "data.loss_on=completion"]

CASES = {
    "packed": [],
    "accumulation": [f"training.global_batch_size={8 * NUM_RANKS}"],
    "short rows": ["training.max_length=128"],
    "one row a sequence": ["training.packing=false"],
    "sdpa": ["model.attn_implementation=sdpa"],
    "eager attention": ["model.attn_implementation=eager"],
    "recomputed": ["memory=recompute"],
    "kept": ["memory=keep"],
    "selective": ["memory=selective"],
    "offloaded parameters": ["fsdp=offload"],
    "whole copies": ["fsdp=no_shard", f"training.global_batch_size={8 * NUM_RANKS}"],
    "dropout": ["lora.lora_dropout=0.1"],
    "dora": ["lora.use_dora=true"],
    "new tokens": ["tokenizer.add_tokens=[the,cat]"],
    "embeddings and head trained": ["lora.modules_to_save=[lm_head,embed_tokens]"],
    "int8": ["quant=int8"],
    "8-bit optimizer": ["optim=adamw_8bit"],
    "torch's kernels": ["kernels.fuse_layers=false", "kernels.cross_entropy=torch", "kernels.liger=false"],
    "Triton dequantizes": ["kernels.dequantize=triton"],
    "experts": [],
    "dpo": PAIRS,
    "dpo, reference in the step": [*PAIRS, "preference.precompute=false"],
    "kto": [*PAIRS, "preference.loss=kto"],
    "reward": ["task=reward", "training.packing=false", "data.path=PAIRS", "data.loss_on=completion"],
}


def write_long_rows(file: Path) -> Path:
    """Rows of 100 to 900 bytes."""
    rng = random.Random(0)
    words = [" ".join(rng.choices(WORDS, k=rng.randint(25, 220))) for _ in range(300)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return file


@pytest.fixture(scope="module")
def common(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    folder = tmp_path_factory.mktemp("long")
    pairs = write_pairs(folder / "pairs.jsonl", 600)
    rows, experts = write_long_rows(folder / "rows.jsonl"), make_experts("mixtral", folder / "mixtral")
    llama = Path(shutil.copytree(checkpoint("llama"), folder / "llama"))
    for config in (experts / "config.json", llama / "config.json"):
        values = json.loads(config.read_text()) | {"max_position_embeddings": MAX_LENGTH}
        config.write_text(json.dumps(values))
    plain = [f"training.max_steps={NUM_STEPS}", f"training.max_length={MAX_LENGTH}", "training.deterministic=true"]
    plain += [f"training.global_batch_size={2 * NUM_RANKS}", "training.micro_batch_size=2", "data.loss_on=all"]

    def find(case: str) -> list[str]:
        model = experts if case == "experts" else llama
        own = [text.replace("PAIRS", str(pairs)) for text in CASES[case]]
        return settings(model, rows, *plain, "training.packing=auto", *own)

    return find


@pytest.fixture(scope="module")
def trained(common: Callable[[str], list[str]], tmp_path_factory: pytest.TempPathFactory):
    """Losses of (case, run), and the folder of the run."""
    folders = tmp_path_factory.mktemp("deterministic")

    def folder(case: str, name: str) -> Path:
        return folders / f"{list(CASES).index(case)}-{name}"

    def argv(case: str, name: str) -> list[str]:
        own = [*common(case), *RUNS[name], f"run.folder={folder(case, name)}"]
        if name == "resumed":
            return [*own, f"checkpoint.resume={folder(case, 'straight') / RESUMED}"]
        return [*own, f"checkpoint.every_steps={STEP}"]

    world = once(
        lambda: run_ranks(
            NUM_RANKS, train_all, {(c, n): argv(c, n) for c in CASES for n in RUNS}, gpu=True, timeout_seconds=1500
        )
    )
    return folder, world


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["again", "launched", "resumed"])
def test_same_bits(trained, case: str, name: str):
    folder, world = trained
    losses = {run: world()[0][case, run].losses for run in ("straight", name)}
    expected = losses["straight"][STEP if name == "resumed" else 0 :]
    assert len(expected) == NUM_STEPS - (STEP if name == "resumed" else 0) and losses[name] == expected
    assert (folder(case, name) / ADAPTER).read_bytes() == (folder(case, "straight") / ADAPTER).read_bytes()


def test_packed_steps_were_recorded_and_launched(trained):
    folder, world = trained
    world()
    for name, is_recorded in (("straight", True), ("launched", False)):
        assert (RECORDED in (folder("packed", name) / "train.log").read_text()) == is_recorded


@pytest.mark.parametrize("policy", ["recomputed", "selective"])
def test_bits_do_not_depend_on_what_is_kept_for_backward(trained, policy: str):
    """So `memory.activations=auto` may choose otherwise when other programs have some of the memory."""
    _, world = trained
    assert world()[0][policy, "straight"].losses == world()[0]["kept", "straight"].losses


def train_and_die(argv: list[str]) -> None:
    """Train, and kill this rank without a word once a checkpoint has been written."""
    folder = Path(load_config(argv).run.folder) / "checkpoints"

    def die() -> None:
        while not checkpoint_folders(folder):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    train_here([*argv, "training.max_steps=100000", "checkpoint.allow_changes=[training.max_steps]"])


def test_a_killed_run_goes_on_to_the_bit(common: Callable[[str], list[str]], tmp_path: Path):
    argv = [*common("packed"), f"training.max_steps={NUM_LONG}", "checkpoint.every_steps=5"]
    straight, killed = ([*argv, f"run.folder={tmp_path / name}"] for name in ("straight", "killed"))
    killed += ["run.overwrite=false", "checkpoint.allow_changes=[training.max_steps]"]
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(NUM_RANKS, train_and_die, killed, gpu=True)
    run_ranks(NUM_RANKS, train_all, {"straight": straight, "killed": killed}, gpu=True)
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("straight", "killed")]
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in some if "loss" in line] for some in lines]
    assert losses[0] == losses[1] and len(losses[0]) == NUM_LONG
    assert (tmp_path / "straight" / ADAPTER).read_bytes() == (tmp_path / "killed" / ADAPTER).read_bytes()
