"""What the model learns otherwise than the data says is told, with the rows that it is about counted over all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.glm import write_glm_files
from tests.helpers.lines import write_lines
from tests.helpers.model_templates import model_template

from qlora_fsdp.config.schema import BadRows, Config, DataConfig, DataFormat, LossOn, ModelConfig, Thoughts
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.chats.told import EMPTY_THOUGHTS, NO_STOP, THOUGHTS_LEFT_OUT, TOLD, WORDS_LEFT_OUT
from qlora_fsdp.data.cut import SAME_ROW
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.tokenize import RowTokenizer
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


CALL = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": CALLED["tool_calls"]}


def think(row: list[dict[str, Any]], template: str, **settings: Any) -> list[str]:
    """What is trained on of a row, an example a line, with ⟦ and ⟧ around it and without the rest."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = model_template(template)
    values = {"data_format": DataFormat.auto, "loss_on": LossOn.completion, "thoughts": Thoughts.all, **settings}
    rows = RowTokenizer(tokenizer, max_length=5000, bad_rows=BadRows.error, **values)
    out = rows.whole({"place": ["row"], "row": [json.dumps({"messages": row}).encode()]})
    assert [flags & SAME_ROW > 0 for flags in out["flags"]] == [number > 0 for number in range(len(out["flags"]))]
    return [tokenizer.decode(tokens[mask]) for tokens, mask in zip(out["tokens"], out["is_target"], strict=True)]


TWO = [ASKED, {**THOUGHT, "reasoning_content": "First."}, ASKED, {**THOUGHT, "reasoning_content": "Second."}]
STOP = "<|im_end|>"


def test_each_answer_is_trained_on_with_its_thoughts_once():
    said = [f"<think>\n{thought}\n</think>\n\nHello!{STOP}" for thought in ("First.", "Second.")]
    assert think(TWO, "qwen3") == said
    assert think(TWO, "qwen3", thoughts=Thoughts.last) == [f"Hello!{STOP}{said[1]}"]


def test_steps_of_one_question_stay_together():
    traces = [ASKED, CALL, RESULT, {**THOUGHT, "reasoning_content": "Two."}, ASKED, {**SAID, "reasoning_content": "3"}]
    first, second = think(traces, "qwen3")
    assert "I look." in first and "tool_call" in first and "Two." in first and first.count(STOP) == 2
    assert second == f"<think>\n3\n</think>\n\nHello!{STOP}"


def test_answers_without_thoughts_are_trained_on_in_the_whole_conversation():
    first, whole = think([*TWO[:2], ASKED, SAID], "qwen3")
    assert "First." in first and whole == f"<think>\n\n</think>\n\nHello!{STOP}"
    assert len(think([ASKED, SAID, *TWO[2:]], "qwen3")) == 1


@pytest.mark.parametrize("template", ["phi_4", "qwen3_8"])  # writes none, and all
def test_a_row_stays_one_where_that_helps_nothing(template: str):
    assert think(TWO, template) == think(TWO, template, thoughts=Thoughts.last)


def test_of_the_last_answer_alone_there_is_one_example():
    assert think(TWO, "qwen3", loss_on=LossOn.last) == [f"<think>\nSecond.\n</think>\n\nHello!{STOP}"]


@pytest.mark.parametrize(
    "answer", [THOUGHT, {**SAID, "thinking": "Hm."}, {**SAID, "content": "<think>\nHm.\n</think>\n\nHello!"}]
)
def test_thoughts_that_are_not_wanted_are_in_no_text(answer: dict[str, Any]):
    assert think([ASKED, answer], "qwen3", thoughts=Thoughts.none) == think([ASKED, SAID], "qwen3")


def test_examples_of_a_row_are_counted_and_kept_in_the_cache(tmp_path: Path):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TWO}, {"messages": [ASKED, THOUGHT]}])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = model_template("qwen3")
    made = {}
    for thoughts in Thoughts:
        data = DataConfig(path=str(path), cache_folder=str(tmp_path / "cache"), thoughts=thoughts)
        spec = DataSpec.of(Config(data=data))
        tokenize_source(data.path, spec, tokenizer)
        rows, report = load_source(data.path, spec, tokenizer, 300)
        made[thoughts] = (report.num_rows, report.num_used_rows, rows.raw_rows.tolist(), len(report.told))
        if thoughts is Thoughts.all:
            assert report.told[0].startswith("1 row used: data.thoughts=all makes several conversations of each")
    assert made[Thoughts.last] == (2, 2, [1, 2], 1)
    assert made[Thoughts.all] == (2, 3, [1, 1, 2], 1)
    assert made[Thoughts.none][:3] == (2, 2, [1, 2])


LATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A: ' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ c.function.arguments ~ ('' if loop.first else eos_token) }}{% endfor %}"
    "{% if m.tool_calls and m.content %}{{ eos_token + 'A: ' }}{% endif %}{{ (m.content or '') + eos_token }}"
    "{% else %}{{ m.role + ': ' + m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


def test_words_behind_the_token_at_which_the_model_stops_are_told_and_calls_refused():
    """As DeepSeek-R1's distills write them."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = LATE
    text, spans, told = format_messages([ASKED, CALLED, RESULT, SAID], None, LossOn.completion, tokenizer)
    assert [text[start:end] for start, end in spans] == ['add{"x": 1}<eos>', "Hello!<eos>"]
    assert told == WORDS_LEFT_OUT
    calls = [{"type": "function", "function": {"name": f"f{n}", "arguments": {"x": n}}} for n in range(3)]
    with pytest.raises(BadRow, match="at which the model stops before a call of message 2"):
        format_messages([ASKED, {**CALLED, "tool_calls": calls}, RESULT, SAID], None, LossOn.completion, tokenizer)
    with pytest.raises(BadRow, match="at which the model stops before a call of message 2"):
        format_messages(
            [ASKED, {**CALLED, "content": "", "tool_calls": calls}, RESULT, SAID], None, LossOn.completion, tokenizer
        )


def test_a_header_that_the_prompt_writes_with_more_space_is_not_trained_on():
    """As vLLM's template of Llama 4, whose prompt begins with a line break that conversations have not."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant:\n' }}{% endif %}"
    )
    text, spans, _ = format_messages([ASKED, SAID, ASKED, SAID], None, LossOn.completion, tokenizer)
    assert [text[start:end] for start, end in spans] == ["Hello!<eos>"] * 2
