"""LoRA on embeddings: stock PEFT's losses on 1, 2 and 3 ranks; adapters that PEFT loads, and merged models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qlora_fsdp import merge
from qlora_fsdp.config.schema import QuantConfig
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock, stock_losses
from tests.helpers.runs import settings, train_all

pytestmark = pytest.mark.distributed
ADAPTED = ["lora.target_modules=[q_proj,down_proj,embed_tokens]", "optim.embedding_learning_rate=2e-3"]
STEPS = ["training.max_steps=4", "training.global_batch_size=6", "training.micro_batch_size=1"]
CASES = {
    "untied": ("llama", []),
    "tied": ("qwen2", []),
    "in int8": ("llama", ["quant.embeddings=int8"]),
    "scaled": ("gemma3_text", []),
}
INPUT_IDS = torch.arange(60).view(2, 30) * 7 % 256


@pytest.fixture(scope="module")
def bases(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {family: checkpoint(family, torch.float32) for family, _ in CASES.values()}


@pytest.fixture(scope="module")
def runs(bases: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("embedding_adapters")
    return {
        case: settings(bases[family], rows, f"run.folder={folder / case.replace(' ', '_')}", *ADAPTED, *STEPS, *more)
        for case, (family, more) in CASES.items()
    }


@pytest.fixture(scope="module")
def losses(runs: dict[str, list[str]]) -> dict[str, list[float]]:
    found = run_ranks(2, train_all, runs)[0]
    return {case: found[case].losses for case in runs}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_peft(losses, runs, case: str):
    assert losses[case] == pytest.approx(stock_losses(runs[case]), abs=1e-5)


def test_losses_do_not_depend_on_the_number_of_ranks(losses, runs):
    """Rank 8 over three ranks is 3, 3 and 2 rows of A."""
    for num_ranks in (1, 3):
        found = run_ranks(num_ranks, train_all, {"untied": [*runs["untied"], "run.overwrite=true"]})
        for result in found:
            assert result["untied"].losses == pytest.approx(losses["untied"], abs=1e-5)


@pytest.mark.parametrize("case", ["untied", "tied", "in int8", "scaled"])
def test_merged_logits_are_those_of_peft(losses, runs, bases, tmp_path: Path, case: str):
    config = load_config(runs[case])
    adapter = Path(config.run.folder) / "adapter"
    keys = load_file(adapter / "adapter_model.safetensors")
    (first,) = (value for key, value in keys.items() if key.endswith("embed_tokens.lora_embedding_A"))
    assert first.abs().max() > 0, "it has learned"
    assert "not every server reads" in (adapter / "README.md").read_text()
    out = tmp_path / "merged"
    assert merge.main([f"adapter={adapter}", f"out={out}", "report=false"]) == 0
    quant = QuantConfig(load_in_4bit=False)
    stock = peft.PeftModel.from_pretrained(load_stock(bases[CASES[case][0]], quant), adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(INPUT_IDS).logits, stock(input_ids=INPUT_IDS).logits, rtol=0, atol=5e-5)


def test_an_adapter_that_peft_has_saved_with_its_copy_of_the_table(bases, tmp_path: Path):
    torch.manual_seed(0)
    settings_of_peft = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_stock(bases["llama"], QuantConfig(load_in_4bit=False)), settings_of_peft).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    base = [f"model.path={bases['llama']}", "model.tokenizer_path=bytes", "report=false"]
    assert merge.main([f"adapter={tmp_path / 'adapter'}", f"out={tmp_path / 'merged'}", *base]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(
            merged.eval()(INPUT_IDS).logits, model(input_ids=INPUT_IDS).logits, rtol=0, atol=5e-5
        )
