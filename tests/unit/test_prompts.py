"""How prompts are written for an adapter: as in its training, unless the user says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.quick_config import load_config

from qlora_fsdp.common import text
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.adapter.adapter_config import SETTINGS_FILE
from qlora_fsdp.config.reading.commands import (
    CommandSettings,
    load_command,
    read_started_from,
    read_trained_on,
    saved_settings,
)
from qlora_fsdp.config.schema import BadRows, DataFormat, LossOn
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.read import find_form
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import byte_tokenizer, template_name
from qlora_fsdp.generate import GenerateSettings, _read_rows, tokenize_prompts
from qlora_fsdp.inference.prompts import PromptStyle, chat_tokens, choose_style, style_tokens


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (DataFormat.messages, "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (None, "<bos><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (DataFormat.prompt_completion, "<bos>hi"),
        (DataFormat.text, "<bos>hi"),
        (DataFormat.instruction, "### Instruction:\nhi\n\n### Response:\n"),
    ],
)
def test_a_prompt_is_written_as_in_training(form: DataFormat | None, written: str):
    tokenizer = byte_tokenizer()
    style, _ = choose_style(tokenizer, form, raw=False)
    assert tokenizer.decode(style_tokens(style, tokenizer, "hi", "row 1")).endswith(written)
    assert choose_style(tokenizer, form, raw=True) == (PromptStyle.plain, "raw=true")


@pytest.mark.parametrize("prompt", ["hi", "<bos>hi", "hi<eos>", "<bos>", ""])
def test_a_plain_prompt_has_the_tokens_that_training_gives_it(prompt: str):
    tokenizer = byte_tokenizer()
    raw = json.dumps({"prompt": prompt, "completion": "x"}).encode()
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 100, BadRows.error)
    [tokens] = rows({"place": ["row 1"], "row": [raw]})["tokens"]
    assert style_tokens(PromptStyle.plain, tokenizer, prompt, "row 1") == tokens[:-2].tolist()  # without x and <eos>


def test_without_a_template_a_prompt_is_as_it_is():
    tokenizer = byte_tokenizer()
    assert template_name(tokenizer) == "chatml"
    tokenizer.chat_template = "{{ messages }}"
    assert template_name(tokenizer) == "the tokenizer's own"
    tokenizer.chat_template = None
    assert template_name(tokenizer) == "none"
    assert choose_style(tokenizer, None, raw=False) == (PromptStyle.plain, "the tokenizer has no chat template")


def test_a_prompt_begins_with_the_system_message_of_training(tmp_path: Path):
    tokenizer, system = byte_tokenizer(), "You are terse."
    written = "<bos><|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    tokens = style_tokens(PromptStyle.chat, tokenizer, "hi", "row 1", system)
    assert tokenizer.decode(tokens) == f"{written}<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Talk."}, {"role": "user", "content": "hi"}]
    assert "terse" not in tokenizer.decode(chat_tokens(tokenizer, own, None, "row 1", system))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    trained = load_config(["model=tiny", "data.path=a", f"data.system_prompt='{system}'"])
    (tmp_path / SETTINGS_FILE).write_text(saved_settings(trained))
    _, config = load_command([f"adapter={tmp_path}"], CommandSettings, "")
    assert config.data.system_prompt == system
    assert "data:" not in saved_settings(load_config(["model=tiny", "data.path=a"]))


def test_a_conversation_is_written_as_in_training():
    """Null fields count as missing, tools may be text, and what is no conversation is named."""
    tokenizer = byte_tokenizer()
    keys, names = "{{ m.keys() | list }}{{ m.content }}", "{{ tools | map(attribute='name') | list }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{keys}{{% endfor %}}{names}"
    messages = [{"role": "user", "content": "a", "name": None}]
    tokens = chat_tokens(tokenizer, messages, json.dumps([{"name": "f"}]), "row 1")
    assert tokenizer.decode(tokens) == "['role', 'content']a['f']"
    for odd, reason in (("hi", "messages is str, not a list"), ([{"role": "user"}], "message 1 has no content")):
        with pytest.raises(DataError, match=f"row 1: .*{reason}"):
            chat_tokens(tokenizer, odd, None, "row 1")


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": CHAT}, DataFormat.messages),
        ({"conversations": SHAREGPT}, DataFormat.messages),
        ({"prompt": "a", "completion": "b"}, DataFormat.prompt_completion),
        ({"instruction": "a", "output": "b"}, DataFormat.instruction),
        ({"text": "a"}, DataFormat.text),
        ({"label": "a"}, None),
    ],
)
def test_the_form_of_the_rows_is_saved_with_the_adapter(tmp_path: Path, row: dict, form: DataFormat | None):
    (tmp_path / "rows.jsonl").write_text("no JSON\n" + json.dumps(row) + "\n")
    config = load_config(["model=tiny", f"data.path={tmp_path}/rows.jsonl", "data.bad_rows=skip"])
    assert find_form(DataSpec.of(config)) == form
    (tmp_path / SETTINGS_FILE).write_text(saved_settings(config, trained_on=form))
    assert read_trained_on(str(tmp_path)) == form
    assert find_form(DataSpec.of(load_config(["model=tiny", "data=random"]))) is None


def test_the_note_of_an_adapter_of_others(tmp_path: Path):
    assert read_trained_on(None) is read_trained_on(str(tmp_path)) is None
    for note in ("evil: thing", "trained_on: [1]", "trained_on: ${oc.env:HOME}", "[1]"):
        (tmp_path / SETTINGS_FILE).write_text(note)
        assert read_trained_on(str(tmp_path)) is None


def test_the_notes_of_an_adapter_in_the_hubs_cache_are_read(tmp_path: Path):
    """There, each file is a link. Without the notes prompts, and a preference's reference, would silently be others."""
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("trained_on: text\nstarted_from: 12ab\n")
    (snapshot / SETTINGS_FILE).symlink_to("../../blobs/1")
    assert read_trained_on(str(snapshot)) is DataFormat.text and read_started_from(str(snapshot)) == "12ab"


def test_only_a_terminal_is_spared_control_characters(monkeypatch: pytest.MonkeyPatch):
    said = "a\x1b]0;title\x07\n\tb\x9b"
    assert text.for_stdout(said) == said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert text.for_stdout(said) == "a?]0;title?\n        b?"


@pytest.mark.parametrize("line", ["What is a dot?", '{"question": "What is a dot?"}'])
def test_a_file_of_other_lines_is_answered_with_how_they_are_written(tmp_path: Path, line: str):
    (tmp_path / "prompts.txt").write_text(line)
    with pytest.raises(DataError, match=r'line 1 .* Make each line {"prompt": "..."}'):
        _read_rows(GenerateSettings(prompts=str(tmp_path / "prompts.txt")))


def test_prompts_beside_images_are_refused(tmp_path: Path):
    rows = [{"prompt": "What is a dot?", "images": []}, {"prompt": "What is it?", "images": ["cat.png"]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="line 2 has images, and a model of text sees none"):
        _read_rows(GenerateSettings(prompts=str(file)))


def test_a_prompt_in_a_file_may_be_messages():
    turns = [{"role": "user", "content": "hi"}]
    trained: Any = SimpleNamespace(tokenizer=byte_tokenizer())
    of_prompt, of_messages = tokenize_prompts(
        [{"prompt": turns}, {"messages": turns}], trained, GenerateSettings(), None
    )
    assert of_prompt == of_messages


def test_a_conversation_in_a_file_begins_with_its_own_system_column():
    rows = [{"messages": [{"role": "user", "content": "hi"}], "system": text} for text in ("Talk.", "", None)]
    trained: Any = SimpleNamespace(tokenizer=byte_tokenizer())
    texts = [
        trained.tokenizer.decode(tokens) for tokens in tokenize_prompts(rows, trained, GenerateSettings(), "Be terse.")
    ]
    assert [("Talk." in text, "terse" in text) for text in texts] == [(True, False), (False, True), (False, True)]


def test_a_prompt_in_a_file_has_its_own_system_message_and_tools():
    """As the conversation of one turn has that it becomes."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    trained: Any = SimpleNamespace(tokenizer=byte_tokenizer())
    template = Path(__file__).parents[1] / "helpers" / "templates" / "qwen2.5.jinja"
    trained.tokenizer.chat_template = template.read_text()
    own = {"system": "Talk.", "tools": tools}
    rows = [{"prompt": "hi", **own}, {"messages": [{"role": "user", "content": "hi"}], **own}]
    of_prompt, of_messages = tokenize_prompts(rows, trained, GenerateSettings(), "Be terse.")
    assert of_prompt == of_messages


def test_a_conversation_that_is_answered_already_is_told(caplog: pytest.LogCaptureFixture):
    """As in a file of held-out rows, where the model would answer its own answer."""
    trained: Any = SimpleNamespace(tokenizer=byte_tokenizer())
    asked = [{"role": "user", "content": "hi"}]
    rows = [{"messages": asked}, {"messages": [*asked, {"role": "assistant", "content": "Hello."}]}]
    with caplog.at_level("INFO", "qlora_fsdp"):
        tokenize_prompts(rows[:1], trained, GenerateSettings(), None)
        assert not caplog.messages
        tokenize_prompts(rows, trained, GenerateSettings(), None)
    assert "1 of 2 conversations end with the assistant's answer" in caplog.text
