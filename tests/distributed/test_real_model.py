"""A real chat model of 135 M parameters: losses, completions and merges are those of stock libraries.

Random models have no text that they prefer, so small errors hide in them. This one answers questions. It comes out of a
Python package (scripts/make_smollm2.py); without the package these tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qlora_fsdp import generate, merge
from tests.helpers.lines import read_lines, write_lines
from tests.helpers.quick_config import load_config
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import add_lora, global_batches, load_stock, train_stock
from tests.helpers.runs import printed_by, settings, train_all
from tests.helpers.smollm2 import needs_smollm2

pytestmark = [pytest.mark.distributed, pytest.mark.slow, needs_smollm2]
PAIRS = Path(__file__).parents[2] / "demo" / "docstrings.jsonl"
QUESTIONS = ["What is the capital of France?", "What does `textwrap.dedent(text)` do?"]
NUM_NEW = 8
SOME = ["training.max_steps=2", "training.global_batch_size=2", "training.max_length=96", "model.tokenizer_path=null"]


def use(folder: Path, rows: Path) -> tuple[dict[str, list[float]], str]:
    """On one of two ranks: the losses of a run in each format, and what the first one's adapter answers."""
    model = folder / "model"
    cases = {
        quant: settings(model, rows, *SOME, f"quant={quant}", f"run.folder={folder / quant}")
        for quant in ("nf4", "int8")
    }
    losses = {case: trained.losses for case, trained in train_all(cases).items()}
    prompts = folder / "prompts.jsonl"
    answers = printed_by(
        generate.main, [f"adapter={folder / 'nf4' / 'adapter'}", f"prompts={prompts}", f"max_new_tokens={NUM_NEW}"]
    )
    return losses, answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The model, chats to train on, and prompts."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "model").symlink_to(smollm2)
    pairs = read_lines(PAIRS)[:40]
    chats = [
        [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["completion"]}] for p in pairs
    ]
    write_lines(folder / "chats.jsonl", ({"messages": chat} for chat in chats))
    asked = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    write_lines(folder / "prompts.jsonl", asked)
    return folder


@pytest.fixture(scope="module")
def used(folder: Path) -> tuple[dict[str, list[float]], str]:
    """What rank 0 of two found."""
    found: tuple[dict[str, list[float]], str] = run_ranks(2, use, folder, folder / "chats.jsonl")[0]
    return found


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_losses_are_those_of_stock_libraries(used, folder: Path, quant: str) -> None:
    config = load_config(settings(folder / "model", folder / "chats.jsonl", *SOME, f"quant={quant}"))
    stock = add_lora(load_stock(folder / "model", config.quant), config)
    batches = global_batches(config, AutoTokenizer.from_pretrained(folder / "model"))
    reference = train_stock(stock, batches, config)
    assert used[0][quant] == pytest.approx(reference, abs=1e-4)
    assert reference[0] < 6  # a model that knows English; random weights would begin at ln 49,152 = 10.8


def test_completions_are_those_of_stock_libraries(used, folder: Path) -> None:
    adapter = folder / "nf4" / "adapter"
    config = load_config([f"model.path={folder / 'model'}"])
    model = peft.PeftModel.from_pretrained(load_stock(folder / "model", config.quant), adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    expected = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
        )
        expected.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    assert [json.loads(line)["completion"] for line in used[1].splitlines()] == expected
    assert all(expected) and expected[0] != expected[1]


def test_merge_onto_full_precision_is_that_of_peft(used, folder: Path) -> None:
    adapter, out = folder / "nf4" / "adapter", folder / "merged"
    assert merge.main([f"adapter={adapter}", f"out={out}"]) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    stock = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(out)(QUESTIONS[0])["input_ids"]])
    with torch.no_grad():
        expected, found = stock(input_ids=ids).logits, merged(input_ids=ids).logits
    # The merged files are in bfloat16, as the base's are; stock merged in float32 here.
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
