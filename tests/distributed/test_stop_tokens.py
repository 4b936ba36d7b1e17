"""A small model that knows its rows by heart stops where it was trained to, in `generate` and `chat`."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from qlora_fsdp import chat, evaluate, generate
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from tests.helpers.checkpoints import OTHER_FAMILIES, SHAPE
from tests.helpers.glm import write_glm_files
from tests.helpers.model_templates import model_template
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


def write_chatml_files(folder: Path, template: str = CHATML) -> Path:
    """Writes a base model's tokenizer and generation_config.json: their end token is not that of ChatML's turns."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def asked_and_answered(answers: dict[str, dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A conversation for each answer."""
    return [[{"role": "user", "content": asked}, {"role": "assistant", **said}] for asked, said in answers.items()]


def train(
    tokenizer: PreTrainedTokenizerBase, folder: Path, chats: list[list[dict[str, Any]]], family: str = "glm4_moe"
) -> list[str]:
    """Trains a random small model on conversations until it knows them, and saves it.

    Returns:
        What it was trained to say, turn by turn, as `generate` shows it.
    """
    generation = (folder / "generation_config.json").read_text()
    torch.manual_seed(0)
    shape = {**SHAPE, **OTHER_FAMILIES.get(family, {}), "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 500, BadRows.error)
    made = rows({"place": ["row"] * len(chats), "row": [json.dumps({"messages": chat}).encode() for chat in chats]})
    batches = [
        (torch.tensor(tokens).long()[None], torch.tensor(mask))
        for tokens, mask in zip(made["tokens"], made["is_target"], strict=True)
    ]
    loss = torch.inf
    for _ in range(1200):
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
    said = []
    for tokens, mask in batches:
        for is_target, group in groupby(range(len(mask)), key=lambda place: bool(mask[place])):
            if is_target:
                said.append(str(tokenizer.decode(tokens[0, list(group)], skip_special_tokens=True)))
    return said


def talk(settings: list[str], line: str) -> str:
    """What `chat` prints when a line is typed."""
    sys.stdin = io.StringIO(f"{line}\n")
    return printed_by(chat.main, settings)


def test_a_model_whose_stop_tokens_are_the_next_roles_markers_stops(tmp_path: Path):
    folder = write_glm_files(tmp_path / "glm")
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, asked_and_answered(ANSWERS))
    prompts = tmp_path / "asked.jsonl"
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ANSWERS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=150", f"prompts={prompts}"]
    (printed,) = run_ranks(1, printed_by, generate.main, settings)
    said, called = (json.loads(line)["completion"] for line in printed.splitlines())
    assert said == "\n<think></think>\nIt is four."
    assert called.endswith("\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>")
    for asked_for, expected in zip(ANSWERS, (said, called), strict=True):
        (answered,) = run_ranks(1, talk, settings[:-1], asked_for)
        assert answered == f"{expected}\n"


def test_a_model_stops_at_the_token_with_which_its_template_ends_answers(tmp_path: Path):
    """As a base model that is trained on ChatML, and whose end token is another."""
    folder = write_chatml_files(tmp_path / "chatml")
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, asked_and_answered(SAID))
    (asked,) = SAID
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=50"]
    (completed,) = run_ranks(1, printed_by, generate.main, [*settings, f"prompt={asked}"])
    (answered,) = run_ranks(1, talk, settings, asked)
    assert completed == answered == "It is four.\n"


@pytest.mark.parametrize("in_slots", [True, False])
def test_a_model_stops_at_an_end_marker_of_several_tokens(tmp_path: Path, in_slots: bool):
    """A sampling option that slots do not know lets transformers complete the prompts."""
    folder = write_chatml_files(tmp_path / "plain", CHATML.replace("<|im_end|>", " ###END"))
    if not in_slots:
        GenerationConfig(eos_token_id=byte_tokenizer().eos_token_id, no_repeat_ngram_size=90).save_pretrained(folder)
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, asked_and_answered(SAID))
    (asked,) = SAID
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=50"]
    (completed,) = run_ranks(1, printed_by, generate.main, [*settings, f"prompt={asked}"])
    (answered,) = run_ranks(1, talk, settings, asked)
    assert completed == answered == "It is four. \n"


# Without another stop string, an answer that goes on would be another text.
TASK = {
    "task": "asked",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{completion}}",
    "generation_kwargs": {"until": ["no such text"], "do_sample": False, "max_gen_toks": 50},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.mark.parametrize("end", ["<|im_end|>", "###END"])
def test_tasks_of_lm_eval_are_asked_by_template_arguments_and_stop(tmp_path: Path, end: str):
    """The argument `brief` changes the question, which the model has another answer to."""
    pytest.importorskip("lm_eval")
    template = CHATML.replace("<|im_end|>", end).replace(
        "m.content", "m.content + (' Be brief.' if brief and m.role == 'user' else '')"
    )
    folder = write_chatml_files(tmp_path / "model", template)
    answers = {"two and two?": {"content": "It is four."}, "two and two? Be brief.": {"content": "Four."}}
    train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, asked_and_answered(answers))
    for arguments, said in (([], "It is four."), (["data.template_arguments={brief: true}"], "Four.")):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "two and two?", "completion": said}) + "\n")
        data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / said)}
        (tmp_path / "asked.yaml").write_text(json.dumps({**TASK, "dataset_kwargs": data}))  # JSON is YAML
        settings = [
            f"model.path={folder}",
            "quant=none",
            f"tasks={tmp_path / 'asked.yaml'}",
            "apply_chat_template=true",
        ]
        (printed,) = run_ranks(1, printed_by, evaluate.main, [*settings, *arguments])
        assert json.loads(printed)["tasks"]["asked"]["exact_match,none"] == 1.0


TEMPLATES = Path(__file__).parents[1] / "helpers" / "templates"
MARKERS = re.compile(r"<\|[A-Za-z_]+\|>|</?think>")
# Of each family the class, its template (ours, or the model's own) and the tokens that its generation_config names.
FAMILIES = {
    "Apertus": ("apertus", "apertus", ["<|assistant_end|>", "<|tools_suffix|>"]),
    "Qwen 3.5": ("qwen3_5_text", "model:qwen3_5_think", ["<|im_end|>"]),
    "Command R7B": ("cohere2", "command_r7b", ["<|END_OF_TURN_TOKEN|>"]),
}
WITH_TOOLS = [
    {"role": "user", "content": "add two"},
    {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "abcde0001"}]},
    {"role": "tool", "name": "add", "tool_call_id": "abcde0001", "content": "4"},
    {"role": "assistant", "content": "Four."},
]
THINKING = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "reasoning_content": "A hard one.", "content": "Because."},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_knows_its_rows_answers_thinks_calls_and_hands_over(name: str, tmp_path: Path):
    family, template, stops = FAMILIES[name]
    if template.startswith("model:"):
        source = model_template(template.removeprefix("model:"))
    else:
        source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    folder = tmp_path / "model"
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*MARKERS.findall(source), *stops})})
    tokenizer.chat_template = source
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(stops)).save_pretrained(folder)
    chats = [*asked_and_answered(SAID), WITH_TOOLS, THINKING]
    expected = train(load_tokenizer(ModelConfig(path=str(folder)), DataConfig()), folder, chats, family)

    prompts = tmp_path / "asked.jsonl"
    asked = [chats[0][:1], WITH_TOOLS[:1], WITH_TOOLS[:3], THINKING[:1]]
    prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))
    settings = [f"model.path={folder}", "quant=none", "max_new_tokens=150"]
    (printed,) = run_ranks(1, printed_by, generate.main, [*settings, f"prompts={prompts}"])
    completed = [json.loads(line)["completion"] for line in printed.splitlines()]
    assert completed == expected
    assert "It is four." in completed[0] and "2" in completed[1] and "Four." in completed[2]
    assert "Because." in completed[3]
    (answered,) = run_ranks(1, talk, settings, "two and two?")
    assert answered.rstrip("\n") == expected[0].rstrip("\n")
