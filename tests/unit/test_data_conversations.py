"""Conversations of any form: the turns of the reference, which replays each by itself, in few renders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.model_templates import MODELS, model_template
from tests.helpers.slow_format import replay_all
from tests.unit.test_data_tokens import MISTRAL_TEMPLATE, PLAIN_TEMPLATE, THINKING_TEMPLATE

from qlora_fsdp.config.schema import DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.data.chats import template as chat_template
from qlora_fsdp.data.chats.conversation import format_messages, read_conversation
from qlora_fsdp.data.chats.template import has_generation_marks
from qlora_fsdp.data.format import format_row
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "tests/helpers/templates").glob("*.jinja"), *(ROOT / "src/qlora_fsdp/data/templates").glob("*.jinja")]
CALLS = (
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
TEMPLATES = {
    **{f"{file.parent.parent.name}/{file.stem}": file.read_text() for file in FILES},
    "plain": PLAIN_TEMPLATE,
    "thinking": THINKING_TEMPLATE,
    "moved system": MISTRAL_TEMPLATE,
    "end token": "{% for m in messages %}({{ m['role'] }}){{ m['content'] }}<bos>{% endfor %}"
    "{{ '(assistant)' if add_generation_prompt else eos_token }}",
    "told by nothing": "{% for m in messages %}{{ m['content'] | upper if loop.last else m['role'] }}{% endfor %}",
    "two loops": "{% for m in messages[::-1] %}{% set last = m.role %}{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}" + CALLS + "<end>{% endfor %}{{ '[assistant]' if add_generation_prompt }}",
    "by number": "{% for i in range(messages | length) %}[{{ messages[i].role }}]{{ messages[i].content }}<end>"
    "{% endfor %}{{ '[assistant]' if add_generation_prompt }}",
    "answers of tools in one turn": "{% for m in messages %}"
    "{% if m.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}[{{ m.role }}]{% endif %}{{ m.content }}"
    + CALLS + "{% if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}<end>{% endif %}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}",
    "end before the next turn": "{% for m in messages %}{{ '<end>' if not loop.first }}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{{ '<end>[assistant]' if add_generation_prompt else '<end>' }}",
    "calls of the last turn alone": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %}" + CALLS
    + "{% endif %}<end>{% endfor %}{{ '[assistant]' if add_generation_prompt }}",
    "marks and calls": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}" + CALLS + "<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}",
}  # fmt: skip
# What the templates end answers with; the tokenizer's end token where it is not said.
ENDS = {
    **{"helpers/gemma3": "<end_of_turn>", "helpers/llama3": "<|eot_id|>", "helpers/mistral": "</s>"},
    **dict.fromkeys(("helpers/phi4", "helpers/qwen2.5", "helpers/qwen3"), "<|im_end|>"),
    **dict.fromkeys(("plain", "thinking", "two loops", "by number", "answers of tools in one turn"), "<end>"),
    **{"end token": "<bos>", "end before the next turn": "<end>", "calls of the last turn alone": "<end>"},
}
OF_PARTS = ("idefics3", "llava_next", "smolvlm")  # which write what a message says only where it is parts
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
WORDS = ("a", "Hello!", "né", "[assistant]", "<end>", "\n", "  ", "漢字", "<|im_end|>", "two\nlines", "</s>", "{}")
TOKENIZER = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())


def say(rng: random.Random) -> str:
    """Words that no two messages share."""
    return f"{''.join(rng.choices(WORDS, k=rng.randint(0, 5)))} {rng.getrandbits(40):x}{rng.choice(['', ' ', chr(10)])}"


def answer(rng: random.Random, with_thoughts: bool) -> dict[str, Any]:
    content = say(rng) if rng.random() < 0.97 else rng.choice(["", " ", "<think>\nhm\n</think>"])
    if with_thoughts and rng.random() < 0.5:
        content = f"<think>\n{say(rng)}\n</think>\n\n{content}"
    switch = {"train": False} if rng.random() < 0.1 else {"weight": 1} if rng.random() < 0.1 else {}
    return {"role": "assistant", "content": content, **switch}


def make_conversation(seed: int, with_tools: bool, at_most: int = 12) -> list[dict[str, Any]]:
    """Some exchanges, with or without a system message, thoughts, and calls of tools."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": say(rng)}] if rng.random() < 0.5 else []
    with_thoughts = rng.random() < 0.3
    for _ in range(rng.randint(1, at_most)):
        if rng.random() < 0.98:
            messages.append({"role": "user", "content": say(rng)})
        while with_tools and rng.random() < 0.7:
            names = [rng.choice(["add", "look_up"]) for _ in range(rng.randint(1, 2))]
            calls = [{"type": "function", "function": {"name": name, "arguments": {"x": say(rng)}}} for name in names]
            content = {"content": rng.choice(["", say(rng)])} if rng.random() < 0.9 else {}
            messages.append({"role": "assistant", **content, "tool_calls": calls})
            messages += [{"role": "tool", "content": say(rng)} for _ in calls]
        if rng.random() < 0.98:
            messages.append(answer(rng, with_thoughts))
    return messages


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} if "content" in m else m for m in messages]


def compare(messages: list[dict[str, Any]], tools: Any, stop: str, knows_parts_alone: bool = False) -> tuple[int, int]:
    """Compares a conversation with the reference; how many of its turns could be compared, and how many there are."""
    for_stock = in_parts(messages) if knows_parts_alone else messages
    try:
        text, spans, _ = format_messages(messages, tools, LossOn.completion, TOKENIZER)
    except BadRow as bad:
        assert (
            "can't be told from the rest" not in bad.detail
            or None in replay_all(for_stock, tools, TOKENIZER, stop).turns
        )
        return 0, 0
    expected = replay_all(for_stock, tools, TOKENIZER, stop)
    assert text.startswith(expected.text)
    answers = [m for m in messages if m["role"] == "assistant" and m.get("train", True)]
    trained = "\0".join(text[slice(*span)] for span in spans)
    for answer in answers:
        said = answer.get("content", "").strip().rpartition("\n")[2].strip()
        if answer.get("tool_calls") and said not in text:  # the template writes the call alone
            said = answer["tool_calls"][0]["function"]["name"]
        assert said.rpartition("</think>")[2].strip().casefold() in trained.casefold()
    assert all(turn is None or turn in spans for turn in expected.turns)
    asked = [m["content"].strip() for m in messages if m["role"] != "assistant"]
    assert not any(words in trained for words in asked if len(words) > 9)
    return sum(turn is not None for turn in expected.turns), len(spans)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_are_those_of_the_reference(template: str, with_tools: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATES[template])
    tools = TOOLS if with_tools else None
    compared = [compare(make_conversation(s, with_tools), tools, ENDS.get(template, "<eos>")) for s in range(30)]
    if template in ENDS and not with_tools:
        assert sum(number for number, _ in compared) > 0


@pytest.mark.parametrize("template", [name for name in TEMPLATES if has_generation_marks(TEMPLATES[name])])
def test_marks_of_the_template_decide(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATES[template])
    for seed in range(30):
        messages = [m for m in make_conversation(seed, False) if m.get("train", True) and m["content"].strip()]
        if any(m["role"] == "assistant" for m in messages):
            text, spans, _ = format_messages(messages, None, LossOn.completion, TOKENIZER)
            stock = read_conversation(messages, None, TOKENIZER).render_marks()
            assert (text, list(spans)) == stock


def with_ids(messages: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same conversation with ids of calls, and with thoughts in a field of their own."""
    rng, ids = random.Random(1000 + seed), []  # others than the words of the conversation
    found = []
    for message in messages:
        more: dict[str, Any] = {}
        if message.get("tool_calls"):
            ids = [f"call{number:05d}" for number in range(len(message["tool_calls"]))]
            more["tool_calls"] = [{**call, "id": i} for call, i in zip(message["tool_calls"], ids, strict=True)]
        if message["role"] == "tool":
            more = {"tool_call_id": ids.pop(0), "name": "add"}
        if message["role"] == "assistant" and rng.random() < 0.3:
            more["reasoning_content"] = say(rng)
        found.append({**message, **more})
    return found


@pytest.mark.parametrize("template", MODELS or ["qwen3"])
def test_templates_of_models_give_the_turns_of_the_reference(template: str, monkeypatch: pytest.MonkeyPatch):
    """A reference of n exchanges takes n renders, which themselves take some templates n times n steps: so n is small.

    Longer conversations are tried with the templates above.
    """
    source = model_template(template)
    monkeypatch.setattr(TOKENIZER, "chat_template", source)
    if has_generation_marks(source):
        pytest.skip("its marks decide")
    stop = "<|im_end|>" if "<|im_end|>" in source else "<eos>"
    for seed in range(8):
        messages = make_conversation(seed, seed % 2 == 1, at_most=4)
        messages = with_ids(messages, seed) if seed % 4 > 1 else messages
        compare(messages, TOOLS if seed % 2 else None, stop, template in OF_PARTS)


@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": "Let me add."}])
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"])
def test_calls_without_words_are_trained_on_as_by_the_marks_of_trl(
    template: str, content: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Thoughts that are empty are compared apart: the templates drop them from earlier answers, TRL's do not."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    traces = [{"role": "assistant", **content, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    again = [{"role": "user", "content": "And?"}, *traces, {"role": "assistant", "content": "3"}]
    messages = [{"role": "user", "content": "Add."}, *traces, {"role": "assistant", "content": "Two."}, *again]
    found = []
    for name in (template, f"{template}_training"):
        monkeypatch.setattr(TOKENIZER, "chat_template", model_template(name))
        text, spans, _ = format_messages(messages, TOOLS, LossOn.completion, TOKENIZER)
        found.append([text[start:end].replace("<think>\n\n</think>\n\n", "").strip() for start, end in spans])
    assert found[0] == found[1] and len(found[0]) == 4


def trained_parts_of_gpt_oss(messages: list[dict[str, Any]], tools: Any) -> list[list[str]]:
    """What is trained on by the model's own template, and by TRL's with marks."""
    tokenizer, found = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig()), []
    markers = ["<|start|>", "<|end|>", "<|return|>", "<|message|>", "<|channel|>", "<|call|>"]
    tokenizer.add_tokens(markers, special_tokens=True)
    for name in ("gptoss", "gptoss_training"):
        tokenizer.chat_template = model_template(name)
        text, spans, _ = format_messages(messages, tools, LossOn.completion, tokenizer)
        found.append([text[start:end].removeprefix("<|start|>assistant") for start, end in spans])
    return found


def test_earlier_answers_of_gpt_oss_are_trained_on_as_by_the_marks_of_trl():
    messages = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    found = trained_parts_of_gpt_oss(messages, None)
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize("said", [{"content": "Let me see."}, {"thinking": "Is it so?"}])
@pytest.mark.parametrize("ends", ["with an answer", "with a question", "with a call"])
def test_calls_whose_words_gpt_oss_leaves_out_are_trained_on_as_by_the_marks_of_trl(said: dict[str, str], ends: str):
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    step = [{"role": "assistant", "tool_calls": [call], **said}, {"role": "tool", "content": "5"}]
    messages = [{"role": "user", "content": "hi"}, *step, *step, {"role": "assistant", "content": "done"}]
    question = [{"role": "user", "content": "next"}]
    messages += {"with an answer": [], "with a question": question, "with a call": [*question, *step]}[ends]
    found = trained_parts_of_gpt_oss(messages, TOOLS)
    assert found[0] == found[1] and len(found[0]) == (4 if ends == "with a call" else 3)


@pytest.mark.parametrize(
    "template",
    ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gptoss_training", "deepseekv3", "deepseekv3_training"],
)
def test_arguments_of_calls_as_objects_and_as_text_are_the_same(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", model_template(template))
    texts = set()
    for arguments in ({"x": "né"}, '{"x": "né"}'):
        call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "5"},
            {"role": "assistant", "content": "done"},
        ]
        text, spans, _ = format_messages(messages, TOOLS, LossOn.completion, TOKENIZER)
        assert len(spans) == 2 and "né" in text and "\\" not in text[slice(*spans[0])]
        texts.add(text)
    assert len(texts) == 1


def agent_trace(num_calls: int) -> list[dict[str, Any]]:
    """A question, calls of a tool with their answers, and the answer. No two of these say the same."""
    rng = random.Random(num_calls)
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What do the files say? {rng.random()}"}]
    for number in range(num_calls):
        call = {"name": "open_file", "arguments": {"path": f"{rng.random()}.txt"}}
        calls = [{"type": "function", "id": f"call{number:05d}", "function": call}]
        messages.append({"role": "assistant", "content": f"Let me see {rng.random()}", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": f"{rng.random()}"})
    return [*messages, {"role": "assistant", "content": f"They say {rng.random()}"}]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen2_5_training", "qwen3", "glm4moe_training", "qwen3_vl"])
def test_conversations_of_kinds_seen_before_take_one_render(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", model_template(template))
    renders, traces = [], []
    render, trace = chat_template.render_jinja_template, chat_template.Conversation.trace
    monkeypatch.setattr(chat_template, "render_jinja_template", lambda **kw: renders.append(1) or render(**kw))
    monkeypatch.setattr(chat_template.Conversation, "trace", lambda self: traces.append(1) or trace(self))
    for num_calls in (3, 4):
        format_messages(agent_trace(num_calls), TOOLS, LossOn.completion, TOKENIZER)
    renders.clear()
    traces.clear()
    for num_calls in (2, 40, 5):
        _, spans, _ = format_messages(agent_trace(num_calls), TOOLS, LossOn.completion, TOKENIZER)
        assert len(spans) == num_calls + 1
    assert (len(renders), len(traces)) == (0, 3)


@pytest.mark.parametrize(
    "template", ["helpers/qwen2.5", "helpers/qwen3", "helpers/llama3", "helpers/mistral", "plain", "marks and calls"]
)
def test_long_conversations_take_few_renders(template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATES[template])
    rng, messages, counts = random.Random(0), [{"role": "system", "content": "Be brief."}], []
    render = chat_template.render_jinja_template
    monkeypatch.setattr(chat_template, "render_jinja_template", lambda **kw: counts.append(1) or render(**kw))
    calls = [{"function": {"name": "add", "arguments": {}}}] if template.endswith(("2.5", "calls")) else None
    for _ in range(60):
        messages.append({"role": "user", "content": say(rng)})
        if calls:
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": say(rng)})
        messages.append({"role": "assistant", "content": say(rng)})
    _, spans, _ = format_messages(messages, None, LossOn.completion, TOKENIZER)
    assert len(spans) == (120 if calls else 60)
    assert sum(counts) <= 40  # of small conversations, most of them


def called(template: str, monkeypatch: pytest.MonkeyPatch, num_calls: int, **said: Any) -> list[str]:
    """What is trained on of a conversation whose tools are called and answer, and of the question that follows."""
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    function = {"name": "add", "arguments": {"x": 1}}
    calls = [{"type": "function", "id": f"call0000{n}", "function": function} for n in range(num_calls)]
    answers = [{"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "five"} for call in calls]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **said, "tool_calls": calls}, *answers]
    more = [("assistant", "done"), ("user", "next"), ("assistant", "last")]
    messages += [{"role": role, "content": content} for role, content in more]
    text, spans, _ = format_messages(messages, TOOLS, LossOn.completion, TOKENIZER)
    return [text[start:end] for start, end in spans]


def test_a_template_that_writes_the_first_of_two_calls_alone_refuses_the_row(monkeypatch: pytest.MonkeyPatch):
    assert len(called(model_template("gptoss"), monkeypatch, 1)) == 3
    with pytest.raises(BadRow, match="leaves out one of the tool_calls of message 2"):
        called(model_template("gptoss"), monkeypatch, 2)


@pytest.mark.parametrize("said", [{}, {"content": ""}])
def test_a_template_that_writes_no_calls_refuses_the_row(said: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """LLaVA's way: of a message without content nothing is written, of an empty one a space."""
    template = "{% for m in messages %}{{ m.role.upper() + ': ' }}{% if m.content is string %}{{ m.content + ' ' }}"
    template += "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    with pytest.raises(BadRow, match="leaves out the tool_calls of message 2"):
        called(template, monkeypatch, 1, **said)


@pytest.mark.parametrize("said", [{}, {"content": "I add."}])
@pytest.mark.parametrize("template", ["mistral_v2v3", "mistral_v3_tekken"])
def test_calls_are_found_where_the_template_moves_the_tools(
    template: str, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """The words of a call are left out."""
    call, *answers = called(model_template(template), monkeypatch, 2, **said)
    assert call.startswith("[TOOL_CALLS]") and call.count('"add"') == 2 and call.endswith(TOKENIZER.eos_token)
    assert [answer.strip() for answer in answers] == [f"{word}{TOKENIZER.eos_token}" for word in ("done", "last")]


@pytest.mark.parametrize("template", ["mistral_v2v3", "mistral_v3_tekken"])
def test_words_of_a_call_do_not_hide_it_where_the_template_moves_the_system_message(
    template: str, monkeypatch: pytest.MonkeyPatch
):
    """These templates write the call without its words, and the system message only before the last user's."""
    monkeypatch.setattr(TOKENIZER, "chat_template", model_template(template))
    call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
    ]
    text, ((start, end),), _ = format_messages(messages, TOOLS, LossOn.completion, TOKENIZER)
    assert text[start:end].startswith("[TOOL_CALLS]") and end == len(text)
    with pytest.raises(BadRow, match="leaves out the system message"):
        format_row(DataFormat.messages, {"messages": messages, "tools": TOOLS}, LossOn.completion, TOKENIZER)


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}])
def test_a_template_that_writes_calls_only_where_content_is_null(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    call, *answers = called(model_template("deepseek_r1_distill"), monkeypatch, 2, **said)
    assert "function" in call and call.count('{"x": 1}') == 2 and len(answers) == 2


def test_the_answer_of_a_tool_within_the_turn_that_calls_it_is_not_trained_on(monkeypatch: pytest.MonkeyPatch):
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{% if m.tool_calls %}call:"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments.x }}{% endif %}"
        "{% if m.tool_calls and not loop.last %}({{ loop.nextitem.content }}){% endif %}{{ m.content }}<end>"
        "{% endif %}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
    )
    with pytest.raises(BadRow, match="message 2 so that it can't be told from the rest"):
        called(template, monkeypatch, 1, content="I add.")
