"""Optimizers, losses, rates and orders of rows against their stock or published form, 20 losses each, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora, global_batches, load_stock, stock_losses, train_stock
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
SLOWER = "training.learning_rate=0.0003"
PADDED = "training.packing=false"

# The reference: bitsandbytes for Lion and AdamW in 8 bits, transformers for Adafactor, label smoothing and the order by
# lengths, PEFT for LoRA+, and DFT as its paper has it (tests/helpers/reference.py).
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


@pytest.fixture(scope="module")
def arguments(checkpoint: Callable[..., Path], rows: Path) -> dict[str, list[str]]:
    return {case: settings(checkpoint(family), rows, *more) for case, (family, more) in CASES.items()}


@pytest.fixture(scope="module")
def losses(arguments: dict[str, list[str]]) -> dict[str, list[float]]:
    """Of runs on two ranks, which agree."""
    first, second = run_ranks(2, train_all, arguments)
    assert all(first[case].losses == second[case].losses for case in arguments)
    return {case: trained.losses for case, trained in first.items()}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_published_form(arguments, losses, case: str):
    found = losses[case]
    assert len(found) == 20
    assert found == pytest.approx(stock_losses(arguments[case]), abs=TOLERANCE)


def test_neftune_is_transformers(checkpoint: Callable[..., Path], rows: Path):
    """Rows alone, with the random numbers of each step: transformers counts a row's padding, where there is some."""
    alone = ["task.neftune_noise_alpha=5", PADDED, "training.global_batch_size=1"]
    argv = settings(checkpoint("llama"), rows, *alone)
    quiet = settings(checkpoint("llama"), rows, *alone[1:])
    (trained,) = run_ranks(1, train_all, {"noisy": argv, "again": argv, "quiet": quiet})
    config = load_config(argv)
    model = add_lora(load_stock(Path(config.model.path), config.quant), config)
    embeddings = model.get_base_model().get_input_embeddings()
    embeddings.neftune_noise_alpha = 5
    embeddings.register_forward_hook(neftune_post_forward_hook)

    def seed_noise(step: int) -> None:
        seed = np.random.SeedSequence([config.training.seed, step, 0]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(seed))

    expected = train_stock(model, global_batches(config), config, before_step=seed_noise)
    assert trained["noisy"].losses == trained["again"].losses == pytest.approx(expected, abs=TOLERANCE)
    assert trained["quiet"].losses != pytest.approx(expected, abs=1e-3)
