"""Ollama Modelfiles: chat templates that put words around messages become Go templates; others are left alone."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from qlora_fsdp.data.chats import template as chat_template
from qlora_fsdp.inference.modelfile import find_template, make_modelfile

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_TURN_IS_OTHER = (
    "{% for m in messages %}{% if loop.index > 2 %}AGAIN {% endif %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "<u>": 1}, "<u>")))
    made.chat_template = template
    return made


def test_words_around_messages_become_a_template_of_ollama():
    text = make_modelfile(["FROM ./model.gguf"], tokenizer(CHATML), {}, ["<|im_end|>"])
    assert text == (
        'FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}'
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}<|im_start|>assistant\n"""\nSYSTEM """Be kind."""\nPARAMETER stop "<|im_end|>"\n'
    )


@pytest.mark.parametrize("template", [FIRST_TURN_IS_OTHER, CHATML.replace("Be kind.", "{{ strftime_now('%d') }}")])
def test_templates_that_do_more_are_left_to_ollama(template: str):
    assert find_template(tokenizer(template), {}) is None
    text = make_modelfile(["FROM ./model.gguf"], tokenizer(template), {}, [])
    assert "TEMPLATE" not in text and "not translated" in text


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("<|im_start|>", "\x1b[1m"),
        CHATML.replace("<|im_start|>", "\t"),
        CHATML.replace("{{ m.content }}", "{{ '{' + m.content }}"),
        CHATML.replace("Be kind.", '"Be kind."'),
    ],
)
def test_words_that_a_modelfile_would_change_are_not_written(template: str):
    assert find_template(tokenizer(template), {}) is None


@pytest.mark.parametrize("loop", ["{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "{{ 1 // 0 }}"])
def test_a_template_beyond_the_limits_is_left_alone(loop: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 1.0)
    monkeypatch.setattr(chat_template, "RENDER_BYTES", 2**30)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 100_000)
    assert find_template(tokenizer(CHATML + loop), {}) is None


def test_models_without_a_template_get_none():
    assert make_modelfile(["FROM ./model.gguf"], tokenizer(None), {}, []) == "FROM ./model.gguf\n"
