"""A small GLM that knows its rows by heart stops where it was trained to, in `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from qlora_fsdp import generate
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import load_tokenizer
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE
from tests.helpers.glm import write_glm_files
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
ANSWERS: dict[str, dict[str, Any]] = {
    "two and two?": {"content": "It is four."},
    "add two": {"content": "", "tool_calls": [CALL]},
}


def train(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Trains a random Glm4Moe on one conversation for each answer, until it knows them, and saves it."""
    torch.manual_seed(0)
    shape = {**SHAPE, **OTHER_FAMILIES["glm4_moe"], "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 500, BadRows.error)
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", **said}] for asked, said in ANSWERS.items()]
    made = rows({"place": ["row"] * 2, "row": [json.dumps({"messages": chat}).encode() for chat in chats]})
    batches = [
        (torch.tensor(tokens).long()[None], torch.tensor(mask))
        for tokens, mask in zip(made["tokens"], made["is_target"], strict=True)
    ]
    loss = torch.inf
    for _ in range(300):
        losses = [
            cross_entropy(model(tokens).logits[0, :-1][mask[1:]], tokens[0, 1:][mask[1:]]) for tokens, mask in batches
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        loss = max(losses).item()
        if loss < 0.005:
            break
    assert loss < 0.005
    model.save_pretrained(folder)


def test_a_model_whose_stop_tokens_are_the_next_roles_markers_stops(tmp_path: Path):
    folder = write_glm_files(tmp_path / "glm")
    generation = (folder / "generation_config.json").read_text()
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder)
    (folder / "generation_config.json").write_text(generation)  # the model has saved one of its own
    prompts = tmp_path / "asked.jsonl"
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ANSWERS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=150", f"prompts={prompts}"]
    (printed,) = run_ranks(1, printed_by, generate.main, settings)
    said, called = (json.loads(line)["completion"] for line in printed.splitlines())
    assert said == "\n<think></think>\nIt is four."
    assert called.endswith("\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>")
