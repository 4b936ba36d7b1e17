"""Families with more than linear layers and attention: fused experts, GPT-2's Conv1D, layers that carry a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_fsdp import evaluate, generate, merge, train
from tests.helpers.checkpoints import SHAPE, VOCAB, write_checkpoint
from tests.helpers.packed import SMALL
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import load_stock, stock_loss, stock_losses
from tests.helpers.runs import printed_by, settings, train_here, write_rows

pytestmark = pytest.mark.distributed
NUM_ROWS = 6
CASES = {  # GPT-2 in full precision, as transformers quantizes its Conv1D and we do not
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}, []),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, []),
    "gpt2": ({}, ["quant=none"]),
}
WITHOUT_SDPA = {
    "bloom": ({}, []),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, ["lora=attention"]),
}
OTHERS = CASES | WITHOUT_SDPA
# Trained with training.packing=auto: whether they are packed, and settings of their own. In full precision, because the
# reference's quantized layers round in another order than ours, and layers that carry a state make more of that.
AUTO = {
    "qwen3_moe": (True, ["quant=none"]),
    "gemma3n_text": (True, ["quant=none"]),
    "gemma4_text": (True, ["quant=none"]),
    "gemma4_unified_text": (True, ["quant=none"]),
    "qwen3_next": (True, ["quant=none"]),
    "qwen3_5_text": (True, ["quant=none"]),
    "lfm2": (True, ["quant=none", "lora.target_modules=[q_proj,v_proj]"]),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    shapes = {family: SMALL[family] for family in AUTO} | {family: shape for family, (shape, _) in OTHERS.items()}
    for family, shape in shapes.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SHAPE, **shape}, initializer_range=0.1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / family, save_original_format=False)
    return {family: folder / family for family in shapes}


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", NUM_ROWS)


@pytest.mark.parametrize(("family", "num_ranks"), [*((family, 1) for family in CASES), ("qwen3_moe", 2)])
def test_the_base_alone(bases, few_rows: Path, family: str, num_ranks: int):
    base = [f"model.path={bases[family]}", "model.tokenizer_path=bytes", *CASES[family][1]]
    data = [f"data.path={few_rows}", f"data.cache_folder={few_rows.parent}", "training.max_length=64"]
    found, *_ = run_ranks(num_ranks, printed_by, evaluate.main, [*base, *data, "training=padded"])
    expected, _ = stock_loss(load_stock(bases[family], load_config(base).quant).eval(), few_rows)
    assert json.loads(found)["loss"] == pytest.approx(expected, abs=1e-5)
    if num_ranks == 1:
        assert generate.main([*base, "prompt=rain", "max_new_tokens=2"]) == 0


def test_weights_that_a_model_halves_in_evaluation_stay_as_they_are(few_rows: Path, tmp_path: Path):
    """RWKV halves them, and what goes through its layers. The stock model does neither as long as it is in training."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128}
    config = AutoConfig.for_model("rwkv", **sizes, num_hidden_layers=3, context_length=64, rescale_every=1)
    base = [f"model.path={write_checkpoint(config, tmp_path / 'base')}", "model.tokenizer_path=bytes"]
    data = [f"data.path={few_rows}", f"data.cache_folder={few_rows.parent}", "training.max_length=64"]
    (found,) = run_ranks(1, printed_by, evaluate.main, [*base, *data, "training=padded"])
    expected, _ = stock_loss(load_stock(tmp_path / "base", load_config(base).quant).train(), few_rows)
    assert json.loads(found)["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_merge_with_a_report(bases, few_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = ["lora=attention", "training.max_steps=2", f"run.folder={tmp_path / 'run'}"]
    assert train.main(settings(bases["qwen3_moe"], few_rows, *more, packing=False)) == 0
    report = [f"report_data={few_rows}", "report_rows=2", f"data.cache_folder={few_rows.parent}"]
    arguments = [f"adapter={tmp_path / 'run' / 'adapter'}", f"out={tmp_path / 'merged'}", "base=dequantized"]
    assert merge.main([*arguments, *report]) == 0
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert models["merged"]["loss"] == pytest.approx(models["trained"]["loss"], abs=1e-5)


@pytest.mark.parametrize("family", WITHOUT_SDPA)
def test_auto_takes_eager_where_transformers_has_no_sdpa(
    bases, few_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
):
    more = [*WITHOUT_SDPA[family][1], "training.max_steps=2", f"run.folder={tmp_path / 'run'}"]
    argv = settings(bases[family], few_rows, *more, packing=False)
    (found,) = run_ranks(1, train_here, argv)
    assert found.losses == pytest.approx(stock_losses(argv), abs=1e-4)
    said = (tmp_path / "run" / "train.log").read_text()
    assert "eager attention" in said
    assert train.main([*argv, "model.attn_implementation=sdpa"]) == 2
    assert "model.attn_implementation=eager" in capsys.readouterr().err


@pytest.mark.parametrize("family", AUTO)
def test_auto_packs_or_pads_and_computes_what_stock_libraries_do(bases, few_rows: Path, tmp_path: Path, family: str):
    """Padded rows, too, are more than one a batch, and shorter than it."""
    is_packed, more = AUTO[family]
    more = ["lora=attention", *more, "training.max_steps=3", "training.micro_batch_size=2"]
    ours = settings(bases[family], few_rows, *more, "training.packing=auto", f"run.folder={tmp_path / 'run'}")
    (found,) = run_ranks(1, train_here, ours)
    reference = stock_losses(settings(bases[family], few_rows, *more, packing=is_packed))
    assert found.losses == pytest.approx(reference, abs=1e-5)
    said = (tmp_path / "run" / "train.log").read_text()
    assert ("are padded: packed rows can't be computed" in said) == (not is_packed)
