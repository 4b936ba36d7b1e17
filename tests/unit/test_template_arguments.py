"""data.template_arguments: what every render of the chat template is given, in training and when a model is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helpers.lines import write_lines
from tests.helpers.quick_config import load_config

from qlora_fsdp.config.adapter.foreign_settings import read_foreign_settings
from qlora_fsdp.config.reading.commands import saved_settings
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.cache import fingerprint
from qlora_fsdp.data.notes import check_arguments
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import load_tokenizer
from qlora_fsdp.inference.prompts import chat_tokens
from qlora_fsdp.records.check_run_folder import check_run
from qlora_fsdp.training.describe_adapter import _describe_prompt

# As Qwen 3's: where no thoughts are wanted, the prompt for an answer has empty ones.
TEMPLATE = (
    "{%- for m in messages %}{{ '<' + m.role + '>' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{ '(' + (m.reasoning_content or '') + ')' }}{% endif %}"
    "{{- m.content + eos_token }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '()' }}{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]


def make_tokenizer(folder: Path, arguments: dict[str, Any]) -> Any:
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    data = DataConfig(chat_template=str(file), template_arguments=arguments)
    return load_tokenizer(ModelConfig(tokenizer_path="bytes"), data)


@pytest.mark.parametrize(
    ("arguments", "trained", "prompt"),
    [({}, "()Hello!<eos>", "<assistant>"), ({"enable_thinking": False}, "Hello!<eos>", "<assistant>()")],
)
def test_turns_begin_behind_the_prompt_that_these_arguments_give(tmp_path, arguments, trained, prompt) -> None:
    tokenizer = make_tokenizer(tmp_path, arguments)
    rows = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 500, BadRows.error)
    out = rows({"place": ["row"], "row": [json.dumps({"messages": CHAT}).encode()]})
    assert tokenizer.decode(out["tokens"][0][out["is_target"][0]]) == trained
    assert tokenizer.decode(chat_tokens(tokenizer, CHAT[:1], None, "row 1")).endswith(f"hi<eos>{prompt}")


def test_rows_are_tokenized_anew_with_other_arguments(tmp_path) -> None:
    keys = {fingerprint(make_tokenizer(tmp_path, arguments)) for arguments in ({}, {"a": 1}, {"a": 2})}
    assert len(keys) == 3


def test_they_are_saved_with_the_adapter_and_read_from_its_folder(tmp_path) -> None:
    config = load_config(["model=tiny", "data.path=a.jsonl", "data.template_arguments={enable_thinking: false}"])
    file = tmp_path / "qlora_fsdp.yaml"
    file.write_text(saved_settings(config))
    saved, _ = read_foreign_settings(file)
    assert saved["data"] == {"template_arguments": {"enable_thinking": False}}
    assert "data" not in yaml.safe_load(saved_settings(load_config(["model=tiny", "data.path=a.jsonl"])))


def test_the_model_card_tells_them(tmp_path) -> None:
    told = _describe_prompt(DataFormat.messages, make_tokenizer(tmp_path, {"enable_thinking": False}))
    assert '`{"enable_thinking": false}`' in told and "<eos><assistant>()\n" in told


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("{messages: []}", "has messages, which every template is given by itself"),
        ("{tokenize: true}", "has tokenize, which every template is given by itself"),
        ("{enable-thinking: false}", "has enable-thinking, which is no name"),
    ],
)
def test_names_that_are_not_theirs_are_refused(setting: str, told: str) -> None:
    config = load_config(["model=tiny", "data=default", "data.path=org/name", f"data.template_arguments={setting}"])
    (problem,) = check_run(config)
    assert told in str(problem)


def test_a_classifier_has_no_use_for_them() -> None:
    settings = ["model=tiny", "task=sequence_classification", "task.labels=[a,b]", "data=default", "data.path=org/name"]
    (problem,) = check_run(load_config([*settings, "data.template_arguments={enable_thinking: false}"]))
    assert "has no effect with task.name=sequence_classification: rows are no conversations." in str(problem)


def test_a_name_at_which_the_template_never_looks_is_told(tmp_path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    for arguments, count in (({"enable_thinking": True}, 0), ({"thinking": True}, 1)):
        tokenizer = make_tokenizer(tmp_path, arguments)
        data = DataConfig(path=str(path), template_arguments=arguments)
        notes = check_arguments(tokenizer, DataSpec.of(Config(data=data)))
        assert len(notes) == count and all("thinking, at which the chat template never looks" in n for n in notes)
