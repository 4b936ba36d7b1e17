"""Optimizers, losses, rates, schedules and orders of rows against their stock or published form, 20 losses each.

All in float32, on two ranks in this process, and on one through the real command.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.cli.launch import run_forked
from tests.helpers.lines import read_lines
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import stock_losses
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
SLOWER = "training.learning_rate=0.0003"
PADDED = "training.packing=false"

# The reference: bitsandbytes for Lion and AdamW in 8 bits, transformers for Adafactor, schedules, label smoothing,
# NEFTune and the order by lengths, PEFT for LoRA+ and adapters of embeddings, and DFT as its paper has it
# (tests/helpers/reference.py).
CASES = {
    "lion_32bit": ("llama", ["optim=lion_32bit", "optim.betas=[0.9,0.99]", "optim.weight_decay=0.1", SLOWER]),
    "lion_8bit": ("llama", ["optim=lion_8bit", "lora.r=64", SLOWER]),
    "adafactor": ("llama", ["optim=adafactor", "optim.weight_decay=0.1"]),
    "adafactor with vectors": ("llama", ["optim=adafactor", "lora.use_dora=true"]),
    "LoRA+": ("llama", ["optim.loraplus_lr_ratio=16", SLOWER]),
    "a rate of embeddings": ("llama", ["lora.modules_to_save=[embed_tokens]", "optim.embedding_learning_rate=0.00005"]),
    "a rate of experts": ("qwen3_moe", ["optim.expert_learning_rate=0.005"]),
    "label smoothing": ("llama", ["task.label_smoothing_factor=0.1"]),
    "label smoothing of a trained head": (
        "gemma2",
        ["task.label_smoothing_factor=0.2", "lora.modules_to_save=[lm_head]", PADDED],
    ),
    "dft": ("llama", ["task.loss_type=dft"]),
    "group_by_length": ("llama", ["training.group_by_length=true", PADDED]),
}
# Those that ranks have nothing to do with, and adapters of embeddings, which test_embedding_adapters has on three.
# NEFTune trains rows alone: transformers counts padding, where there is some, and ranks draw noise of their own.
ON_ONE_RANK = {
    "cosine_with_min_lr": (
        "llama",
        ["optim.lr_scheduler_type=cosine_with_min_lr", "optim.lr_scheduler_kwargs={min_lr_rate: 0.3}"],
    ),
    "warmup_stable_decay": (
        "llama",
        [
            "optim.lr_scheduler_type=warmup_stable_decay",
            "optim.lr_scheduler_kwargs={decay_ratio: 0.5, min_lr_ratio: 0.1}",
        ],
    ),
    "polynomial": (
        "llama",
        ["optim.lr_scheduler_type=polynomial", "optim.lr_scheduler_kwargs={power: 2, lr_end: 1e-4}"],
    ),
    "cosine_with_restarts": (
        "llama",
        ["optim.lr_scheduler_type=cosine_with_restarts", "optim.lr_scheduler_kwargs={num_cycles: 3}"],
    ),
    "an adapter of embeddings": ("llama", ["lora.target_modules=[q_proj,down_proj,embed_tokens]"]),
    "NEFTune": ("llama", ["task.neftune_noise_alpha=5", PADDED, "training.global_batch_size=1"]),
}
BY_COMMAND = [
    *("lion_32bit", "adafactor", "LoRA+", "a rate of embeddings", "a rate of experts", "label smoothing", "dft"),
    *("group_by_length", *ON_ONE_RANK),
]


@pytest.fixture(scope="module")
def arguments(checkpoint: Callable[..., Path], rows: Path) -> dict[str, list[str]]:
    every = CASES | ON_ONE_RANK
    return {case: settings(checkpoint(family), rows, *more) for case, (family, more) in every.items()}


@pytest.fixture(scope="module")
def reference(arguments: dict[str, list[str]]) -> Callable[[str], list[float]]:
    return cache(lambda case: stock_losses(arguments[case]))


@pytest.fixture(scope="module")
def losses(arguments: dict[str, list[str]]) -> dict[str, list[float]]:
    """Of runs on two ranks, which agree."""
    first, second = run_ranks(2, train_all, {case: arguments[case] for case in CASES})
    assert all(first[case].losses == second[case].losses for case in CASES)
    return {case: trained.losses for case, trained in first.items()}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_published_form(reference, losses, case: str):
    found = losses[case]
    assert len(found) == 20
    assert found == pytest.approx(reference(case), abs=TOLERANCE)


@pytest.mark.parametrize("case", BY_COMMAND)
def test_the_command_has_these_losses_too(arguments, reference, tmp_path: Path, case: str):
    folder = tmp_path / "run"
    code, printed = run_forked(tmp_path, "train", *arguments[case], f"run.folder={folder}")
    assert code == 0, printed
    found = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    assert len(found) == 20
    assert found == pytest.approx(reference(case), abs=TOLERANCE)
