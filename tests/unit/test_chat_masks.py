"""What is trained on of a conversation, by the forms of templates that models come with, none with generation marks.

Expectations are written by hand: the whole text, with what is trained on between ⟦ and ⟧. Tokens are bytes, so that
every character of a mask is compared. The templates are ours, in the forms of the models' own.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lines import write_lines
from tests.helpers.model_templates import model_template
from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, Config, DataConfig, DataFormat, LossOn, ModelConfig
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.conversation import format_messages, read_conversation
from qlora_fsdp.data.notes import check_end_marker
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenizer import load_tokenizer
from qlora_fsdp.inference.prompts import chat_tokens

TEMPLATES = Path(__file__).parents[1] / "helpers" / "templates"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Ciao, é."},
]

EXPECTED = {
    "llama3": (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Ciao, é.<|eot_id|>⟧"
    ),
    # The system message moves to the last user turn. The space before an answer is what the model has to say.
    "mistral": "<bos>[INST] Hi?[/INST]⟦ Hello!</s>⟧[INST] Be brief.\n\nHello![/INST]⟦ Ciao, é.</s>⟧",
    "qwen2.5": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n⟦Ciao, é.<|im_end|>⟧\n"
    ),
    # An empty thought stands before the last answer alone: that is what the model is to say there.
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nCiao, é.<|im_end|>⟧\n"
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nBe brief.\n\nHi?<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\nHello!<end_of_turn>\n<start_of_turn>model\n⟦Ciao, é.<end_of_turn>⟧\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hello!<|im_end|>⟧<|im_start|>user<|im_sep|>Hello!<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Ciao, é.<|im_end|>⟧"
    ),
}


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    """The tokenizer of bytes with a template of ours, or with that of a published model, `model:NAME`."""
    file = TEMPLATES / f"{template}.jinja"
    if template.startswith("model:"):
        tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())
        tokenizer.chat_template = model_template(template.removeprefix("model:"))
        return tokenizer
    data = DataConfig(chat_template=str(file) if file.is_file() else template)
    return load_tokenizer(ModelConfig(tokenizer_path="bytes"), data)


def marked(row: dict[str, Any], template: str, **settings: Any) -> str:
    """The row's text with ⟦ and ⟧ around what is trained on; a bad row's problem and detail."""
    tokenizer = tokenizer_with(template)
    values = {"data_format": DataFormat.auto, "loss_on": LossOn.completion, "max_length": 5000}
    out = RowTokenizer(tokenizer, bad_rows=BadRows.skip, **{**values, **settings})(
        {"place": ["row"], "row": [json.dumps(row).encode()]}
    )
    (tokens,), (mask,) = out["tokens"], out["is_target"]
    if not len(tokens):
        return f"{out['problem'][0]}: {out['detail'][0]}"
    parts, before = [], False
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    for start, end in pairwise(edges):
        text, before = tokenizer.decode(tokens[start:end]), bool(mask[start])
        parts.append(f"⟦{text}⟧" if before else text)
    return "".join(parts)


@pytest.mark.parametrize("template", EXPECTED)
def test_answers_and_their_end_markers_alone(template: str):
    assert marked({"messages": CHAT}, template) == EXPECTED[template]


@pytest.mark.parametrize("template", EXPECTED)
@pytest.mark.parametrize("switch", [{"train": False}, {"weight": 0}, {"training": False}, {"loss": False}])
def test_a_message_that_is_not_to_be_trained_on(template: str, switch: dict[str, Any]):
    messages = [{**m, **switch} if m["content"] == "Ciao, é." else {**m, "weight": 1} for m in CHAT]
    before, _, last = EXPECTED[template].rpartition("⟦")
    assert marked({"messages": messages}, template) == before + last.replace("⟧", "")


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_messages_are_left_out_by_generation_marks_too(template: str):
    shipped = TEMPLATES.parents[2] / "src" / "qlora_fsdp" / "data" / "templates" / f"{template}.jinja"
    assert "generation" in shipped.read_text()
    messages = [{**m, "train": m["content"] != "Ciao, é."} for m in CHAT]
    text = marked({"messages": messages}, str(shipped))
    assert text.count("⟦") == 1 and "⟦Hello!" in text and "Ciao, é." in text.partition("⟧")[2]


# By templates whose end marker is several tokens: behind every turn, between turns alone, and before the end token.
LONG_ENDS = {
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + ' ###END\n' }}{% endfor %}"
    "{{ '### assistant\n' if add_generation_prompt }}": (
        "### user\nHi? ###END\n### assistant\n⟦Hello! ###END⟧\n### user\nHello! ###END\n"
        "### assistant\n⟦Ciao, é. ###END⟧\n"
    ),
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content }}{{ '\n[/end]\n' if not loop.last }}{% endfor %}"
    "{{ '\n[/end]\n### assistant\n' if add_generation_prompt }}": (
        "### user\nHi?\n[/end]\n### assistant\n⟦Hello!\n[/end]⟧\n### user\nHello!\n[/end]\n"
        "### assistant\n⟦Ciao, é.\n[/end]⟧"
    ),
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '[/end]' + eos_token }}{% endfor %}"
    "{{ '### assistant\n' if add_generation_prompt }}": (
        "### user\nHi?[/end]<eos>### assistant\n⟦Hello![/end]<eos>⟧### user\nHello![/end]<eos>"
        "### assistant\n⟦Ciao, é.[/end]<eos>⟧"
    ),
}


@pytest.mark.parametrize("template", LONG_ENDS)
def test_an_end_marker_of_several_tokens_is_trained_on_as_a_whole(tmp_path: Path, template: str):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert marked({"messages": CHAT[1:]}, str(file)) == LONG_ENDS[template]


# It collects its text, looks at what it has, and writes all of it at the end.
COLLECTED = (
    "{%- set ns = namespace(out='') -%}{%- for m in messages -%}"
    "{%- if ns.out and not ns.out.endswith('|') -%}{%- set ns.out = ns.out ~ '|' -%}{%- endif -%}"
    "{%- set ns.out = ns.out ~ '<' ~ m.role ~ '>' ~ m.content ~ eos_token -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{%- set ns.out = ns.out ~ '|<assistant>' -%}{%- endif -%}{{- ns.out -}}"
)


def test_a_template_that_writes_all_its_text_at_the_end_is_traced(tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text(COLLECTED)
    expected = "<user>Hi?<eos>|<assistant>⟦Hello!<eos>⟧|<user>Hello!<eos>|<assistant>⟦Ciao, é.<eos>⟧"
    assert marked({"messages": CHAT[1:]}, str(file)) == expected
    conversation = read_conversation(CHAT[1:], None, tokenizer_with(str(file)))
    trace = conversation.trace()
    assert trace.text == conversation.render(conversation.messages)
    parts = [trace.text[start:end] for number in range(4) for start, end in trace.parts[number]]
    assert parts == ["<user>Hi?<eos>", "|<assistant>Hello!<eos>", "|<user>Hello!<eos>", "|<assistant>Ciao, é.<eos>"]


@pytest.mark.parametrize(
    ("end", "count"), [("' ###END\n'", 1), ("eos_token", 0), ("'<|im_end|>'", 1), ("'<pad>\n'", 0), ("'~'", 0)]
)
def test_an_end_marker_at_which_servers_do_not_stop_is_told(tmp_path: Path, end: str, count: int):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    template = "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + END }}{% endfor %}".replace("END", end)
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig())
    tokenizer.chat_template = template
    notes = check_end_marker(tokenizer, DataSpec.of(Config(data=DataConfig(path=str(path)))))
    assert len(notes) == count and all("Servers do not stop there by themselves" in note for note in notes)


@pytest.mark.parametrize("template", EXPECTED)
def test_the_last_answer_alone(template: str):
    before, _, last = EXPECTED[template].rpartition("⟦")
    expected = before.replace("⟦", "").replace("⟧", "") + "⟦" + last
    assert marked({"messages": CHAT}, template, loss_on=LossOn.last) == expected


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_the_last_answer_alone_by_generation_marks(template: str):
    shipped = str(TEMPLATES.parents[2] / "src" / "qlora_fsdp" / "data" / "templates" / f"{template}.jinja")
    text = marked({"messages": CHAT}, shipped, loss_on=LossOn.last)
    assert text.count("⟦") == 1 and "⟦Ciao, é." in text


def test_a_last_answer_that_is_not_to_be_trained_on_leaves_nothing():
    row = {"messages": [*CHAT[:-1], {**CHAT[-1], "train": False}]}
    assert marked(row, "qwen3", loss_on=LossOn.last).startswith("no target token: no message of the assistant is to be")


def test_marks_within_answers_belong_to_the_messages_that_the_render_gives_them(tmp_path: Path):
    template = tmp_path / "two.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content[:2] }}{% endgeneration %}"
        "-{% generation %}{{ m.content[2:] + eos_token }}{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abcd"}] * 2
    text = marked({"messages": messages}, str(template), loss_on=LossOn.last)
    assert text == "<u>hi<a>ab-cd<eos><u>hi<a>⟦ab⟧-⟦cd<eos>⟧"


@pytest.mark.parametrize("is_text", [False, True])  # as a list, and as data sets with fixed columns have it
def test_tools_their_calls_and_their_answers(is_text: bool):
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tools = json.dumps([tool]) if is_text else [tool]
    assert marked({"messages": messages, "tools": tools}, "qwen2.5") == (
        '<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n<tools>\n{"type": "function", "function": '
        '{"name": "add", "parameters": {}}}\n</tools><|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n'
        '<|im_start|>assistant\n⟦<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        "<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦It is 3.<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("tools", "kind", "detail"),
    [
        ("add, subtract", "not JSON", "tools is text that is no JSON"),
        ({"name": "add"}, "wrong types", "tools is dict, not a list of JSON schemas"),
        ([{"name": "add"}, {"function": "add"}], "wrong types", "tool 2 is not an object with a name"),
    ],
)
def test_tools_that_are_none(tools: Any, kind: str, detail: str):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": tools}
    with pytest.raises(BadRow) as caught:
        read_row(row, DataFormat.auto, {})
    assert caught.value.kind == kind and detail in caught.value.detail


def test_thoughts_of_earlier_answers_are_dropped_as_the_template_does():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nd"},
    ]
    assert marked({"messages": messages}, "qwen3") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nso\n</think>\n\nd<|im_end|>⟧\n"
    )


def test_sharegpt_turns_are_messages():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    assert marked({"conversations": turns, "id": 3}, "phi4") == EXPECTED["phi4"]
    assert marked({"conversations": turns[1:], "system": "Be brief."}, "phi4") == EXPECTED["phi4"]
    assert marked({"conversations": CHAT}, "phi4") == EXPECTED["phi4"]  # with the keys of messages
    turns[-1]["weight"] = 0
    assert marked({"conversations": turns}, "phi4").count("⟦") == 1


def test_a_system_column_stands_before_messages_that_have_none():
    turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello!"}]
    expected = marked({"messages": CHAT[:3]}, "qwen2.5")
    assert marked({"messages": CHAT[1:3], "system": "Be brief."}, "qwen2.5") == expected
    assert marked({"messages": turns, "system": "Be brief."}, "qwen2.5") == expected
    assert marked({"messages": CHAT[:3], "system": "Be long."}, "qwen2.5") == expected


@pytest.mark.parametrize("prompt", [CHAT[:4], CHAT[1]["content"]])
def test_a_prompt_and_a_completion_may_be_messages(prompt: Any):
    turns = prompt if isinstance(prompt, list) else [CHAT[1]]
    row = {"prompt": prompt, "completion": [CHAT[4]]}
    untrained = [{**turn, "train": False} for turn in turns]
    assert marked(row, "qwen2.5") == marked({"messages": [*untrained, CHAT[4]]}, "qwen2.5")
    assert marked({**row, "completion": CHAT[4]["content"]}, "qwen2.5").count("⟦") == 1


def test_sharegpt_calls_of_tools_are_those_of_messages():
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    turns = [
        {"from": "human", "value": "1+2?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tools = [{"name": "add", "parameters": {}}]
    text = marked({"conversations": turns, "tools": json.dumps(tools)}, "qwen2.5")
    assert text == marked({"messages": messages, "tools": tools}, "qwen2.5") and text.count("⟦") == 2


@pytest.mark.parametrize("template", ["chatml", "gemma3", "mistral"])
def test_parts_of_text_are_text(template: str):
    in_parts = [
        {**m, "content": [{"type": "text", "text": part} for part in m["content"].partition(" ")]} for m in CHAT
    ]
    shipped = str(TEMPLATES.parents[2] / "src" / "qlora_fsdp" / "data" / "templates" / "chatml.jinja")
    name = shipped if template == "chatml" else template
    assert marked({"messages": in_parts}, name) == marked({"messages": CHAT}, name)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": [{"from": "alien", "value": "a"}]}, "wrong keys: turn 1 is from 'alien', none of human"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "wrong keys: turn 1 is from ['human'], none of"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "not JSON: turn 1 is a function_call that"),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, "wrong types: turn 1 is a function_call w"),
        ({"messages": [CHAT[1], {**CHAT[2], "content": " "}]}, "empty: message 2, an answer to train on, is empty"),
        (
            {"messages": [{**CHAT[1], "role": "human"}, {**CHAT[2], "role": "bot"}]},
            "no target token: no message of the assistant (roles: human, bot; write assistant for the role of who",
        ),
        ({"conversations": "a"}, "wrong types: conversations is not a list of turns"),
        ({"conversations": [{"from": "human"}]}, "wrong keys: message 1 has no content"),
        ({"messages": [{**CHAT[2], "weight": 0.5}]}, "wrong types: weight of message 1 is 0.5, neither 0 nor 1"),
        ({"messages": [CHAT[1], {**CHAT[2], "train": False}]}, "no target token"),
        (
            {
                "messages": [
                    CHAT[1],
                    {**CHAT[2], "train_detail": [{"begin_offset": 0, "train": False}]},
                ]
            },
            "wrong keys: message 2 has train_detail, and a message is trained on as a whole or not",
        ),
        (
            {"prompt": "[{'role': 'user', 'content': 'a'}]", "completion": "b"},
            "wrong types: prompt is text that holds a list of messages; write the list itself",
        ),
        (
            {"messages": [CHAT[1], {**CHAT[2], "content": "", "function_call": {"name": "f", "arguments": "{}"}}]},
            "wrong keys: message 2 has function_call, OpenAI's older form; write tool_calls",
        ),
        ({"messages": CHAT[1:], "images": ["a.png"]}, "wrong keys: the row has images, and training is on text alone"),
        ({"prompt": "a", "completion": "b", "image": "a.png"}, "wrong keys: the row has image, and training is on"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "wrong keys: history is not empty"),
        ({"prompt": CHAT[:2], "completion": 3}, "wrong types: int beside a list of messages is neither text nor"),
        (
            {"chosen": "a", "rejected": "b"},
            "wrong keys: keys are chosen, rejected: answers to compare; set task=preference or task=reward",
        ),
        ({"messages": CHAT[:1] + CHAT[2:]}, "refused by the chat template: Conversation roles must alternate"),
    ],
)
def test_rows_that_can_not_be_used(row: dict[str, Any], problem: str):
    assert marked(row, "gemma3").startswith(problem)


def test_what_a_template_does_not_know_is_told_beside_its_own_words():
    shipped = str(TEMPLATES.parents[2] / "src" / "qlora_fsdp" / "data" / "templates" / "chatml.jinja")
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    told = marked({"messages": [picture, CHAT[2]]}, shipped)
    assert told.startswith("refused by the chat template: ") and told.endswith("message 1 has parts: image, text")
    told = marked({"messages": [CHAT[1], call]}, shipped)
    assert told.endswith("'content'; message 2 calls tools and has no content")


IMAGE, QUESTION = {"type": "image"}, {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    ("asked", "answered", "problem"),
    [
        ([IMAGE, QUESTION], "a cat", "wrong keys: message 1 has a part of type image, and training is on text alone"),
        ([{"type": "image_url"}], "a cat", "wrong keys: message 1 has a part of type image_url, and training is on"),
        (["What is it?"], "a cat", "refused by the chat template: it leaves out the part of type str of message 1"),
        ("Hi?", ["a cat"], "refused by the chat template: it leaves out the part of type str of message 2"),
        (
            "Hi?",
            [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "a cat"}],
            "refused by the chat template: it leaves out the part of type text of message 2; write text, or set",
        ),
    ],
)
def test_no_part_of_a_message_is_left_out_silently(asked: Any, answered: Any, problem: str):
    """As in templates of Qwen 3, which write text alone, and nothing where content is something else."""
    says = "{{ message.content if message.content is string else '' }}"
    template = "{% for message in messages %}<{{ message.role }}>" + says + "<end>{% endfor %}"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatml"))
    tokenizer.chat_template = template
    found = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 5000, BadRows.skip)(
        {"place": ["row"], "row": [json.dumps({"messages": messages}).encode()]}
    )
    assert f"{found['problem'][0]}: {found['detail'][0]}".startswith(problem)
    with pytest.raises(DataError, match="here: "):
        chat_tokens(tokenizer, messages, None, "here")


def test_parts_that_a_template_writes_are_trained_on():
    thinks = "{% if part.type == 'thinking' %}({{ part.thinking }}){% else %}{{ part.text }}{% endif %}"
    says = "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}" + thinks
    says += "{% endfor %}{% endif %}"
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatml"))
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>" + says + "<end>{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    thought, answer, empty = {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "A."}, ""
    parts = [thought, answer, {"type": "text", "text": empty}]
    messages = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": parts}]
    text, spans, _ = format_messages(messages, None, LossOn.completion, tokenizer)
    assert [text[slice(*span)] for span in spans] == ["(Hm.)A.<end>"]


@pytest.mark.parametrize("role", ["human", "User", "function", "developer"])
@pytest.mark.parametrize("said", ["Why?", "Because."])  # the same words as another message has
def test_roles_that_a_template_does_not_write_are_told(role: str, said: str):
    row = {"messages": [{"role": "user", "content": "Well?"}, {"role": role, "content": said}, *CHAT[2:]]}
    row["messages"][-1] = {"role": "assistant", "content": "Because."}
    assert marked(row, "model:qwen3").startswith(
        f"refused by the chat template: it leaves out what message 2 says, of the {role}; write system, user, assistant"
    )
    with pytest.raises(DataError, match=f"here: refused by the chat template: .*of the {role}"):
        chat_tokens(tokenizer_with("model:qwen3"), row["messages"][:2], None, "here")


@pytest.mark.parametrize(
    ("which", "reason"),
    [("false", "it leaves out the system message; put that into the first"), ("loop.first", "message 3 says, of the")],
)
def test_system_messages_that_a_template_leaves_out_are_told(which: str, reason: str):
    """Some templates write none, and some the first alone."""
    said = [("system", "Be kind."), ("user", "Hi?"), ("system", "In French."), ("user", "Hello?")]
    messages = [{"role": role, "content": content} for role, content in said]
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path="bytes"), DataConfig(chat_template="chatml"))
    template = f"{{% if m.role != 'system' or {which} %}}<{{{{ m.role }}}}>{{{{ m.content }}}}<end>{{% endif %}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    with pytest.raises(DataError, match=f"here: refused by the chat template: .*{reason}"):
        chat_tokens(tokenizer, messages, None, "here")
    rows = {"place": ["row"], "row": [json.dumps({"messages": [*messages, CHAT[2]]}).encode()]}
    found = RowTokenizer(tokenizer, DataFormat.auto, LossOn.completion, 5000, BadRows.skip)(rows)
    assert reason in found["detail"][0]


def test_an_answer_of_fields_that_the_template_does_not_write_is_empty():
    for fields in ({"reasoning_content": "Hm."}, {"id": 7, "name": "bot"}):
        told = marked({"messages": [CHAT[1], {**CHAT[2], "content": "", **fields}]}, "gemma3")
        reason = "empty: message 2, an answer to train on, is empty, and the chat template leaves out its "
        assert told == reason + ", ".join(fields)
    thought = {"messages": [CHAT[1], {**CHAT[2], "content": "", "reasoning_content": "Hm."}]}
    assert "⟦<think>\nHm.\n</think>" in marked(thought, "model:qwen3")
