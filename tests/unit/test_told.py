"""What the model learns otherwise than the data says is told, with the rows that it is about counted over all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.glm import write_glm_files
from tests.helpers.lines import write_lines
from tests.helpers.model_templates import model_template

from qlora_fsdp.config.schema import Config, DataConfig, LossOn, ModelConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.chats.told import EMPTY_THOUGHTS, NO_STOP, THOUGHTS_LEFT_OUT, TOLD, WORDS_LEFT_OUT
from qlora_fsdp.data.tokenize_source import load_source, tokenize_source
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "Hello!"}
THOUGHT = {**SAID, "reasoning_content": "A greeting."}
CALLED = {
    "role": "assistant",
    "content": "I add.",
    "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"x": 1}}}],
}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "2"}


@pytest.mark.parametrize(
    ("template", "messages", "told"),
    [
        ("phi_4", [ASKED, THOUGHT], THOUGHTS_LEFT_OUT),
        ("qwen3", [ASKED, THOUGHT], 0),
        ("qwen3", [ASKED, THOUGHT, ASKED, {**THOUGHT, "reasoning_content": "Again."}], THOUGHTS_LEFT_OUT),
        ("qwen3", [ASKED, SAID], EMPTY_THOUGHTS),
        ("mistral_v3_tekken", [ASKED, CALLED, RESULT, SAID], WORDS_LEFT_OUT),
        ("qwen2_5", [ASKED, CALLED, RESULT, SAID], 0),
    ],
)
def test_what_a_template_leaves_out_or_adds_is_told(template: str, messages: list[dict[str, Any]], told: int):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = model_template(template)
    assert format_messages(messages, None, LossOn.completion, tokenizer)[2] == told


def test_an_answer_that_no_stop_token_ends_is_told(tmp_path: Path):
    tokenizer = load_tokenizer(ModelConfig(path=str(write_glm_files(tmp_path))), DataConfig())
    assert format_messages([ASKED, SAID, SAID], None, LossOn.completion, tokenizer)[2] & NO_STOP
    assert not format_messages([ASKED, SAID, ASKED, SAID], None, LossOn.completion, tokenizer)[2] & NO_STOP


def test_rows_are_counted_and_the_first_are_named(tmp_path: Path):
    rows = [{"messages": [{**ASKED, "content": str(number)}, THOUGHT]} for number in range(7)]
    rows.append({"messages": [ASKED, SAID]})
    data = DataConfig(path=str(write_lines(tmp_path / "rows.jsonl", rows)), cache_folder=str(tmp_path / "cache"))
    spec = DataSpec.of(Config(data=data))
    tokenizer = byte_tokenizer()  # whose ChatML knows no thoughts
    for _ in range(2):  # the second time it is read from the cache
        tokenize_source(data.path, spec, tokenizer)
        _, report = load_source(data.path, spec, tokenizer, 300)
        (line,) = report.told
        assert line.startswith(f"7 rows used: {TOLD[THOUGHTS_LEFT_OUT]} (rows.jsonl:1, rows.jsonl:2")
        assert line in str(report)
