"""Answers end with a token at which generation stops: those of the tokenizer and of generation_config.json."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.glm import write_glm_files

from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.cache import fingerprint
from qlora_fsdp.data.chats.stops import end_ids_of, end_texts_of
from qlora_fsdp.data.stop_tokens import stop_ids, stop_texts
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = {"role": "user", "content": "1+2?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "3"}
SAID = {"role": "assistant", "content": "Three."}
CALL_TEXT = "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


def marked(folder: Path, messages: list[dict[str, Any]]) -> str:
    """What RowTokenizer makes of a conversation, with ⟦ and ⟧ around what is trained on."""
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)), DataConfig())
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 5000, BadRows.error)
    out = rows({"place": ["row"], "row": [json.dumps({"messages": messages}).encode()]})
    (tokens,), (mask,) = out["tokens"], out["is_target"]
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    texts = [(tokenizer.decode(tokens[start:end]), bool(mask[start])) for start, end in pairwise(edges)]
    return "".join(f"⟦{text}⟧" if is_target else text for text, is_target in texts)


def test_markers_of_the_next_role_end_answers_and_calls(tmp_path: Path):
    folder = write_glm_files(tmp_path)
    assert marked(folder, [ASKED, CALLED, TOLD, SAID, ASKED, SAID]) == (
        f"[gMASK]<sop><|user|>\n1+2?<|assistant|>⟦{CALL_TEXT}<|observation|>⟧\n<tool_response>\n3\n</tool_response>"
        "<|assistant|>⟦\n<think></think>\nThree.<|user|>⟧\n1+2?<|assistant|>⟦\n<think></think>\nThree.<|user|>⟧"
    )


@pytest.mark.parametrize(("last", "stop"), [(SAID, "<|user|>"), (CALLED, "<|observation|>")])
def test_behind_the_last_answer_the_stop_token_of_its_kind_is_added(tmp_path: Path, last: dict[str, Any], stop: str):
    text = marked(write_glm_files(tmp_path), [ASKED, last])
    assert text.endswith(f"{stop}⟧") and text.count(stop) == (2 if stop == "<|user|>" else 1)


def test_nothing_is_added_behind_what_is_not_trained_on(tmp_path: Path):
    folder = write_glm_files(tmp_path)
    assert marked(folder, [ASKED, SAID, ASKED]).endswith("<|user|>⟧\n1+2?")
    assert marked(folder, [ASKED, SAID, ASKED, {**SAID, "train": False}]).endswith("\n<think></think>\nThree.")


def test_stop_tokens_are_those_of_generation_config_that_the_tokenizer_knows(tmp_path: Path):
    folder = write_glm_files(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)), DataConfig())
    assert stop_texts(tokenizer) == ("<eos>", "<|user|>", "<|observation|>")
    before = fingerprint(tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9_999, 65, True, "x"]}))
    alone = load_tokenizer(ModelConfig(path=str(folder)), DataConfig())
    assert stop_ids(alone) == (tokenizer.eos_token_id,)  # 65 is a byte, and no marker
    assert fingerprint(alone) != before


def test_a_fingerprint_does_not_depend_on_what_the_tokenizer_was_asked_before():
    tokenizer = byte_tokenizer()
    before = fingerprint(tokenizer)
    tokenizer("a long text", truncation=True, max_length=3, padding="max_length")
    assert fingerprint(tokenizer) == before


@pytest.mark.parametrize("text", [None, "[", "[]", '{"eos_token_id": null}'])
def test_without_ids_the_end_token_alone_stops(tmp_path: Path, text: str | None):
    folder = write_glm_files(tmp_path)
    (folder / "generation_config.json").unlink()
    if text is not None:
        (folder / "generation_config.json").write_text(text)
    assert stop_texts(load_tokenizer(ModelConfig(path=str(folder)), DataConfig())) == ("<eos>",)


@pytest.mark.parametrize(
    ("end", "expected", "texts"),
    [
        ("'<|im_end|>'", ["<eos>", "<|im_end|>"], ()),
        ("eos_token", ["<eos>"], ()),
        ("'<|im_end|>' + eos_token", ["<eos>"], ()),  # generation stops at the token that training ends with
        ("'<|end|>'", ["<eos>"], ("<|end|>",)),  # several tokens
        ("'}'", ["<eos>"], ()),  # one token of ordinary text, which answers may have
        ("''", ["<eos>"], ()),
    ],
)
def test_generation_stops_where_the_template_ends_answers(end: str, expected: list[str], texts: tuple[str, ...]):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + END }}\n{% endfor %}".replace(
        "END", end
    )
    assert tokenizer.convert_ids_to_tokens(list(end_ids_of(tokenizer))) == expected
    assert end_texts_of(tokenizer) == texts


def test_without_a_template_generation_stops_at_the_stop_tokens():
    assert end_ids_of(byte_tokenizer()) == stop_ids(byte_tokenizer())


ROLES = "{% for m in messages %}{{ m.role + ': ' }}"
WRITTEN = {
    "gpt-oss: what ends thoughts ends earlier answers too, and the end token the last one": (
        ROLES + "{{ m.content }}{{ eos_token if loop.last else '<|im_end|>' }}{% endfor %}",
        ["<eos>"],
    ),
    "GigaChat: the same marker ends answers and stands before calls": (
        ROLES + "{{ m.content or '' }}<|im_end|>{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments }}<|im_end|>{% endfor %}{% endfor %}",
        ["<eos>"],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_marker_that_turns_have_within_them_stops_nothing(name: str):
    template, expected = WRITTEN[name]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = template
    assert tokenizer.convert_ids_to_tokens(list(end_ids_of(tokenizer))) == expected
