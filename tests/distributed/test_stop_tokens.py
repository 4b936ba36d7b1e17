"""A small model that knows its rows by heart stops where it was trained to, in `generate` and `chat`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from qlora_fsdp import chat, generate
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE
from tests.helpers.glm import write_glm_files
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import printed_by

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
ANSWERS: dict[str, dict[str, Any]] = {
    "two and two?": {"content": "It is four."},
    "add two": {"content": "", "tool_calls": [CALL]},
}
SAID = {"two and two?": {"content": "It is four."}}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chatml_files(folder: Path) -> Path:
    """Writes a base model's tokenizer and generation_config.json: their end token is not that of ChatML's turns."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def train(tokenizer: PreTrainedTokenizerBase, folder: Path, answers: dict[str, dict[str, Any]]) -> None:
    """Trains a random Glm4Moe on one conversation for each answer, until it knows them, and saves it."""
    generation = (folder / "generation_config.json").read_text()
    torch.manual_seed(0)
    shape = {**SHAPE, **OTHER_FAMILIES["glm4_moe"], "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 500, BadRows.error)
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", **said}] for asked, said in answers.items()]
    made = rows({"place": ["row"] * len(chats), "row": [json.dumps({"messages": chat}).encode() for chat in chats]})
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
    (folder / "generation_config.json").write_text(generation)  # the model has saved one of its own


def talk(settings: list[str], line: str) -> str:
    """What `chat` prints when a line is typed."""
    sys.stdin = io.StringIO(f"{line}\n")
    return printed_by(chat.main, settings)


def test_a_model_whose_stop_tokens_are_the_next_roles_markers_stops(tmp_path: Path):
    folder = write_glm_files(tmp_path / "glm")
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, ANSWERS)
    prompts = tmp_path / "asked.jsonl"
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ANSWERS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=150", f"prompts={prompts}"]
    (printed,) = run_ranks(1, printed_by, generate.main, settings)
    said, called = (json.loads(line)["completion"] for line in printed.splitlines())
    assert said == "\n<think></think>\nIt is four."
    assert called.endswith("\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>")


def test_a_model_stops_at_the_token_with_which_its_template_ends_answers(tmp_path: Path):
    """As a base model that is trained on ChatML, and whose end token is another."""
    folder = write_chatml_files(tmp_path / "chatml")
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, SAID)
    (asked,) = SAID
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=50"]
    (completed,) = run_ranks(1, printed_by, generate.main, [*settings, f"prompt={asked}"])
    (answered,) = run_ranks(1, talk, settings, asked)
    assert completed == answered == "It is four.\n"
