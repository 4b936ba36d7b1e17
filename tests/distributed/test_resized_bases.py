"""Adapters that others trained on a base that was resized for new tokens: what stock transformers and PEFT give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from qlora_fsdp import evaluate, generate, merge
from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.schema import QuantConfig
from qlora_fsdp.data.tokenizer import byte_tokenizer
from tests.helpers.checkpoints import VOCAB
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import global_batches, load_stock, train_stock
from tests.helpers.runs import settings, train_here

pytestmark = pytest.mark.distributed
MARKS = [f"<t{number}>" for number in range(9)]  # the byte tokenizer has 259 tokens and the models 264 rows
LONGER, SHORTER = VOCAB + 8, VOCAB - 2
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES = {
    "no table is trained": ("llama", LONGER, {}),
    "tied, no table is trained": ("qwen2", LONGER, {}),
    "both are trained": ("llama", LONGER, BOTH),
    "tied, both are trained": ("qwen2", LONGER, BOTH),
    "both are trained and stay tied": ("qwen2", LONGER, BOTH | {"ensure_weight_tying": True}),
    "embeddings are trained": ("llama", LONGER, {"modules_to_save": ["embed_tokens"]}),
    "tied, embeddings are trained": ("qwen2", LONGER, {"modules_to_save": ["embed_tokens"]}),
    "rows are trained": ("llama", LONGER, {"trainable_token_indices": {"embed_tokens": [265, 3], "lm_head": [3, 265]}}),
    "tied, rows are trained": ("qwen2", LONGER, {"trainable_token_indices": [265, 3, 264]}),
    "no table is trained, shorter": ("llama", SHORTER, {}),
    "tied, both are trained, shorter": ("qwen2", SHORTER, BOTH),
    "tied, rows are trained, shorter": ("qwen2", SHORTER, {"trainable_token_indices": [7, 260]}),
}
STAY_TIED = ["tied, no table is trained", "both are trained and stay tied", "tied, rows are trained"]


def resized(base: Path, num_rows: int, options: dict[str, object]) -> peft.PeftModel:
    """Stock PEFT's adapter of the resized base, all of whose new and trained values are random."""
    torch.manual_seed(0)
    model = load_stock(base, QuantConfig(load_in_4bit=False))
    model.resize_token_embeddings(num_rows)
    for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        table.data[VOCAB:].normal_(std=0.3)
    config = peft.LoraConfig(
        **{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | deepcopy(options)
    )  # PEFT changes its lists
    model = peft.get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    return model.eval()


@pytest.fixture(scope="module")
def made(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory):
    """By case: the stock model, and the settings that name its adapter and base."""
    folder, found = tmp_path_factory.mktemp("resized"), {}
    for number, (case, (family, num_rows, options)) in enumerate(CASES.items()):
        base, adapter = checkpoint(family, torch.float32), folder / str(number)
        model = resized(base, num_rows, options)
        model.save_pretrained(adapter)
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(MARKS[: num_rows - 259])
        tokenizer.save_pretrained(adapter)
        found[case] = model, [f"adapter={adapter}", f"model.path={base}", "quant=none"]
    return found


def logits(model: nn.Module, num_rows: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(60).view(2, 30) * 31 % num_rows).logits


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_has_its_tables(made, tmp_path: Path, case: str):
    (model, own), num_rows, out = made[case], CASES[case][1], tmp_path / "merged"
    assert merge.main([*own, f"out={out}"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(merged, num_rows), logits(model, num_rows), rtol=0, atol=2e-5)
    assert merged.config.vocab_size == num_rows
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == (case.removesuffix(", shorter") in STAY_TIED)


@pytest.mark.parametrize("case", CASES)
def test_evaluate_and_generate_use_its_tables(made, tmp_path: Path, capsys, case: str):
    model, own = made[case]
    prompt, completion = "rain <t0>", " and <t1><t2> birds"
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}])
    assert evaluate.main([*own, f"data.path={rows}", f"data.cache_folder={tmp_path}", "training.max_length=64"]) == 0
    found = json.loads(capsys.readouterr().out)
    begin, end = [256, *b"rain ", 259], [*b" and ", 260, 261, *b" birds", 257]
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([begin + end])).logits[0, len(begin) - 1 : -1]
    assert found["loss"] == pytest.approx(F.cross_entropy(scores, torch.tensor(end)).item(), abs=2e-5)

    assert generate.main([*own, f"prompt={prompt}", "raw=true", "max_new_tokens=8"]) == 0
    ids = model.generate(
        input_ids=torch.tensor([begin]), max_new_tokens=8, do_sample=False, pad_token_id=258, eos_token_id=257
    )
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(MARKS[: CASES[case][1] - 259])
    assert capsys.readouterr().out.strip() == tokenizer.decode(ids[0, len(begin) :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("case", ["no table is trained", "tied, rows are trained"])
def test_preferences_are_compared_with_its_tables(made, tmp_path: Path, capsys, case: str):
    """DPO's loss (arXiv:2305.18290, equation 7), of which the reference is the resized base without the adapter."""
    model, own = made[case]
    rows = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "rain <t0>", "chosen": " <t5><t6>", "rejected": " birds"}])
    data = [f"data.path={rows}", f"data.cache_folder={tmp_path}", "training.max_length=64", "task=preference"]
    assert evaluate.main([*own, *data]) == 0
    found = json.loads(capsys.readouterr().out)

    def log_prob(answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([[256, *b"rain ", 259, *answer, 257]])
        with torch.no_grad():
            found = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return found[6:].sum()

    margin = log_prob([*b" ", 264, 265]) - log_prob([*b" birds"])
    with model.disable_adapter():
        margin -= log_prob([*b" ", 264, 265]) - log_prob([*b" birds"])
    assert found["loss"] == pytest.approx(-F.logsigmoid(0.1 * margin).item(), abs=2e-5)
    assert abs(margin) > 0.1


def test_an_adapter_with_whole_tables_is_not_for_vllm(made, tmp_path: Path, capsys):
    assert merge.main([*made["no table is trained"][1], f"out={tmp_path / 'out'}", "write=adapter"]) == 2
    assert "holds whole layers (modules_to_save), which vLLM does not read" in " ".join(capsys.readouterr().err.split())


def test_an_adapter_of_a_resized_head_is_told(checkpoint: Callable[..., Path], tmp_path: Path, capsys):
    """PEFT saves no embeddings beside it, so that a resized base could not be made again."""
    base = checkpoint("llama", torch.float32)
    resized(base, LONGER, {"target_modules": ["q_proj", "lm_head"]}).save_pretrained(tmp_path / "adapter")
    own = [f"adapter={tmp_path / 'adapter'}", f"model.path={base}", "model.tokenizer_path=bytes"]
    assert merge.main([*own, f"out={tmp_path / 'merged'}"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "adapts lm_head of a base that was resized for new tokens" in message and "merge_and_unload" in message


def test_one_of_two_tied_tables_is_told(made, tmp_path: Path, capsys):
    """Some trainers save a state of their own. The head would stay what it is in the base."""
    base, adapter = bases_of(made, "tied, no table is trained")
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    one = shutil.copytree(adapter, tmp_path / "adapter")
    save_file(tensors, one / "adapter_model.safetensors", {"format": "pt"})
    assert generate.main([f"adapter={one}", f"model.path={base}", "prompt=rain"]) == 2
    assert "holds model.embed_tokens of a base that was resized" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("case", ["both are trained", "tied, both are trained, shorter"])
def test_training_goes_on_with_tables_that_were_trained(made, rows: Path, tmp_path: Path, case: str):
    (base, adapter), num_rows = bases_of(made, case), CASES[case][1]
    more = [f"lora.start={adapter}", "quant=none", "training.max_steps=3", f"run.folder={tmp_path / 'run'}"]
    own = [text for text in settings(base, rows, *more) if text != "lora.r=8"]
    losses = run_ranks(2, train_here, own)[0].losses
    config, stock = load_config(own), load_stock(base, QuantConfig(load_in_4bit=False))
    stock.resize_token_embeddings(num_rows)
    stock = peft.PeftModel.from_pretrained(stock, adapter, is_trainable=True)
    assert losses == pytest.approx(train_stock(stock, global_batches(config), config), abs=1e-5)
    result = tmp_path / "run" / "adapter"
    assert f"resize_token_embeddings({num_rows})" in (result / "README.md").read_text()
    again = load_stock(base, QuantConfig(load_in_4bit=False))
    again.resize_token_embeddings(num_rows)
    again = peft.PeftModel.from_pretrained(again, result).eval()
    torch.testing.assert_close(logits(again, num_rows), logits(stock.eval(), num_rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["no table is trained", "embeddings are trained", "tied, rows are trained"])
def test_no_training_goes_on_with_tables_that_were_not(made, rows: Path, case: str):
    """It would train all of them, at the rate of an adapter."""
    base, adapter = bases_of(made, case)
    with pytest.raises(AdapterError, match=r"whole tables that it did not train \(.*lm_head.*qlora-fsdp merge"):
        load_config([*settings(base, rows), f"lora.start={adapter}"])


def bases_of(made, case: str) -> tuple[Path, Path]:
    adapter, base, _ = made[case][1]
    return Path(base.partition("=")[2]), Path(adapter.partition("=")[2])
