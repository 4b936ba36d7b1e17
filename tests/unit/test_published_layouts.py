"""Layouts in which data sets are published: each is read, or refused by a message whose remedy reads it.

The rows are small and written for this test, in the shapes of well-known data sets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.launch import run_forked
from tests.helpers.lines import write_lines

from qlora_fsdp import preview
from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import BadRows, DataConfig, DataFormat, TaskConfig
from qlora_fsdp.data.labels import LabelledRowTokenizer
from qlora_fsdp.data.layouts import read_layout
from qlora_fsdp.data.read import find_source, iterate_rows
from qlora_fsdp.data.read_answers import read_answers
from qlora_fsdp.data.read_row import read_row
from qlora_fsdp.data.row import BadRow, parse_row
from qlora_fsdp.data.tokenizer import byte_tokenizer

U, A, S = "user", "assistant", "system"
ASKED = [{"role": U, "content": "Two and two?"}]
CHAT = [*ASKED, {"role": A, "content": "Four."}]
SHAREGPT = [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]
TOOL = {"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int"}, "b": {"type": "int"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAID = [(U, "Two and two?"), (A, "Four.")]
TEXT = ["Two and two?", "Four."]


def said(form: DataFormat, row: dict[str, Any]) -> list[Any]:
    """What a row of a known form says, in short."""
    if form is DataFormat.messages:
        return [(message["role"], message.get("content") or calls_of(message)) for message in row["messages"]]
    keys = {
        DataFormat.prompt_completion: ("prompt", "completion"),
        DataFormat.instruction: ("instruction", "input", "output"),
        DataFormat.text: ("text",),
    }[form]
    return [row[key] for key in keys if row.get(key)]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]


# The row, and what it says when it is read as it is.
READ: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "OpenAI": ({"messages": CHAT}, SAID),
    "ShareGPT": ({"conversations": SHAREGPT}, SAID),
    "Alpaca": ({"instruction": "Add.", "input": "2 2", "output": "4"}, ["Add.", "2 2", "4"]),
    "Alpaca without an input": ({"instruction": "Two and two?", "output": "Four."}, TEXT),
    "Dolly with its own names": ({"prompt": "Two and two?", "completion": "Four."}, TEXT),
    "pretraining": ({"text": "Four."}, ["Four."]),
    "OpenHermes: conversations and a system prompt": (
        {"conversations": SHAREGPT, "system": "Be brief."},
        [(S, "Be brief."), *SAID],
    ),
    "SlimOrca": (
        {"conversations": [{"from": "system", "value": "Be brief.", "weight": None}, *SHAREGPT]},
        [(S, "Be brief."), *SAID],
    ),
    "Capybara: pairs of input and output": ({"conversation": [{"input": "Two and two?", "output": "Four."}]}, SAID),
    "pairs of texts": ({"conversation": [["Two and two?", "Four."]]}, SAID),
    "UltraChat: texts in turn": ({"messages": TEXT}, SAID),
    "LMSYS: conversation": ({"conversation": CHAT}, SAID),
    "dialog": ({"dialogue": CHAT}, SAID),
    "messages as JSON text": ({"messages": json.dumps(CHAT)}, SAID),
    "conversations as JSON text": ({"conversations": json.dumps(SHAREGPT)}, SAID),
    "Gemini: contents with parts": (
        {
            "contents": [
                {"role": U, "parts": [{"text": "Two and two?"}]},
                {"role": "model", "parts": [{"text": "Four."}]},
            ]
        },
        SAID,
    ),
    "Gemini with a system instruction": (
        {
            "systemInstruction": {"role": S, "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": U, "parts": [{"text": "Two and two?"}]},
                {"role": "model", "parts": [{"text": "Four."}]},
            ],
        },
        [(S, "Be brief."), *SAID],
    ),
    "OpenAI with parts of text": (
        {"messages": [{"role": U, "content": [{"type": "text", "text": "Two and two?"}]}, CHAT[1]]},
        SAID,
    ),
    "xLAM: query, tools and answers as JSON text": (
        {
            "query": "Two and two?",
            "tools": json.dumps([TOOL]),
            "answers": json.dumps([{"name": "add", "arguments": {"a": 2, "b": 2}}]),
        },
        [(U, "Two and two?"), (A, [("add", {"a": 2, "b": 2})])],
    ),
    "Glaive v2: a transcript with a call": (
        {
            "system": "SYSTEM: You may call functions. -\n" + json.dumps(TOOL),
            "chat": 'USER: Two and two?\n\nASSISTANT: <functioncall> {"name": "add", "arguments": \'{"a": 2}\'} '
            "<|endoftext|>\n\nFUNCTION RESPONSE: 4\n\nASSISTANT: Four. <|endoftext|>",
        },
        [
            (S, "You may call functions. -"),
            (U, "Two and two?"),
            (A, [("add", '{"a": 2}')]),
            ("tool", "4"),
            (A, "Four."),
        ],
    ),
    "Anthropic: parts of tools": (
        {
            "messages": [
                *ASKED,
                {
                    "role": A,
                    "content": [
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 2}},
                    ],
                },
                {"role": U, "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]},
                CHAT[1],
            ],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
        },
        [*SAID[:1], (A, "I add."), ("tool", "4"), (A, "Four.")],
    ),
    "ShareGPT with a call": (
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                SHAREGPT[1],
            ]
        },
        [*SAID[:1], (A, [("add", {"a": 2})]), ("tool", "4"), (A, "Four.")],
    ),
    "Tulu: messages with their source": ({"id": "a_1", "messages": CHAT, "source": "flan", "dataset": "x"}, SAID),
    "WildChat: turns that say more of themselves": (
        {
            "conversation_hash": "1",
            "model": "gpt-4",
            "conversation": [{**turn, "language": "English", "toxic": False, "redacted": False} for turn in CHAT],
            "turn": 1,
        },
        SAID,
    ),
    "Hermes: ShareGPT with tools as JSON text": (
        {"conversations": SHAREGPT, "tools": json.dumps([{"type": "function", "function": {"name": "add"}}])},
        SAID,
    ),
    "a prompt that is a chat": ({"prompt": ASKED, "completion": CHAT[1:]}, SAID),
    "a joined table": ({"messages": CHAT, "text": None, "prompt": None}, SAID),
}

# The row, what a message of its refusal says, and what it says when `data.columns` or `data.format` of it is set.
ADVISED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "SQuAD-like: question and answer": ({"question": "Two and two?", "answer": "Four."}, TEXT),
    "OpenOrca: a system prompt beside a question": (
        {"id": "1", "system_prompt": "Be brief.", "question": "Two and two?", "response": "Four."},
        [(S, "Be brief."), *SAID],
    ),
    "sql-create-context: a schema beside a question": (
        {"question": "How many?", "context": "CREATE TABLE t (n INT)", "answer": "SELECT COUNT(*) FROM t"},
        ["How many?", "CREATE TABLE t (n INT)", "SELECT COUNT(*) FROM t"],
    ),
    "Dolly: instruction, context, response": (
        {"instruction": "Add.", "context": "2 2", "response": "4", "category": "math"},
        ["Add.", "2 2", "4"],
    ),
    "s1K: a short solution beside thoughts": (
        {"question": "Two and two?", "solution": "4", "attempt": "Two and two are four.", "cot": "Count."},
        [(U, "Two and two?"), (A, "Two and two are four.")],
    ),
    "medical reasoning: Complex_CoT": (
        {"Question": "Two and two?", "Complex_CoT": "Count.", "Response": "Four."},
        SAID,
    ),
    "MetaMath: query and response": ({"query": "Two and two?", "response": "Four.", "type": "x"}, TEXT),
    "CNN: article and highlights": ({"article": "Long.", "highlights": "Short.", "id": "1"}, ["Long.", "Short."]),
    "XSum: document and summary": ({"text_in": "x", "article": "Long.", "summary": "Short."}, ["Long.", "Short."]),
    "MathInstruct: problem and solution": ({"problem": "Two and two?", "solution": "Four."}, TEXT),
    "turns of own names": (
        {"dialog": [{"speaker": U, "utterance": "Hi."}, {"speaker": A, "utterance": "Ho."}]},
        [(U, "Hi."), (A, "Ho.")],
    ),
    "Flan: inputs and targets": ({"inputs": "Two and two?", "targets": "Four.", "task": "add"}, TEXT),
    "HelpSteer: grades beside a response": (
        {"prompt": "Two and two?", "response": "Four.", "helpfulness": 4, "verbosity": 2},
        TEXT,
    ),
    "code: content": ({"content": "print(4)", "path": "a.py"}, ["print(4)"]),
    "web text: raw_content": ({"raw_content": "Four.", "url": "x"}, ["Four."]),
    "KTO under plain training": ({"prompt": "Two and two?", "completion": "Four.", "label": True}, TEXT),
}

# Rows with answers to compare: the row, and prompt, chosen and rejected.
PAIR = ("Two and two?", "Four.", "Five.")
COMPARED: dict[str, tuple[dict[str, Any], tuple[Any, Any, Any]]] = {
    "TRL's pairs": ({"prompt": PAIR[0], "chosen": PAIR[1], "rejected": PAIR[2]}, PAIR),
    "HH-RLHF: transcripts that begin alike": (
        {
            "chosen": "\n\nHuman: Two and two?\n\nAssistant: Four.",
            "rejected": "\n\nHuman: Two and two?\n\nAssistant: Five.",
        },
        ("\n\nHuman: Two and two?\n\nAssistant:", " Four.", " Five."),
    ),
    "HH-RLHF: chosen begins rejected": (
        {
            "chosen": "\n\nHuman: Two and two?\n\nAssistant: Four",
            "rejected": "\n\nHuman: Two and two?\n\nAssistant: Four or five",
        },
        ("\n\nHuman: Two and two?\n\nAssistant:", " Four", " Four or five"),
    ),
    "UltraFeedback: whole chats": (
        {"prompt": PAIR[0], "chosen": CHAT, "rejected": [*ASKED, {"role": A, "content": "Five."}]},
        (ASKED[0]["content"], "Four.", "Five."),
    ),
    "OpenAI: preferred and non-preferred output": (
        {
            "input": {"messages": ASKED},
            "preferred_output": [CHAT[1]],
            "non_preferred_output": [{"role": A, "content": "Five."}],
        },
        PAIR,
    ),
    "SHP: two references and a label": (
        {"history": PAIR[0], "human_ref_A": "Five.", "human_ref_B": "Four.", "labels": 0},
        PAIR,
    ),
    "Nectar: answers with ranks": (
        {"prompt": PAIR[0], "answers": [{"answer": "Five.", "rank": 2}, {"answer": "Four.", "rank": 1}]},
        PAIR,
    ),
    "scores of completions": (
        {"prompt": PAIR[0], "completions": [{"response": "Four.", "score": 9.0}, {"response": "Five.", "score": 1.0}]},
        PAIR,
    ),
    "a ranked list": ({"prompt": PAIR[0], "responses": ["Five.", "Four."], "ranks": [2, 1]}, PAIR),
    "Arena: a winner": (
        {"prompt": PAIR[0], "response_a": "Four.", "response_b": "Five.", "winner": "model_a"},
        PAIR,
    ),
    "PKU: the better response's number": (
        {"prompt": PAIR[0], "response_0": "Five.", "response_1": "Four.", "better_response_id": 1},
        PAIR,
    ),
    "HelpSteer 3: a preference from -3 to 3": (
        {"context": ASKED, "response1": "Four.", "response2": "Five.", "overall_preference": -2},
        PAIR,
    ),
    "Skywork: two whole chats": ({"chosen": CHAT, "rejected": [*ASKED, {"role": A, "content": "Five."}]}, PAIR),
    "whole conversations": (
        {
            "conversation_a": CHAT,
            "conversation_b": [*ASKED, {"role": A, "content": "Five."}],
            "winner": "model_a",
        },
        PAIR,
    ),
}
ADVISED_PAIRS: dict[str, dict[str, Any]] = {
    "Intel: a system prompt beside the question": {
        "system": "Be brief.",
        "question": PAIR[0],
        "chosen": "Four.",
        "rejected": "Five.",
    },
    "stack exchange: response_j and response_k": {"question": PAIR[0], "response_j": "Four.", "response_k": "Five."},
}

# Two texts that are judged together: the row, and its texts when `data.columns` of the refusal is set.
JUDGED: dict[str, dict[str, Any]] = {
    "GLUE: two sentences": {"idx": 1, "sentence1": "Two.", "sentence2": "Four.", "label": "no"},
    "NLI: premise and hypothesis": {"premise": "Two.", "hypothesis": "Four.", "label": "no"},
    "QQP: two questions": {"question1": "Two.", "question2": "Four.", "label": "no"},
}
KNOWS_CALLS = Path(__file__).parents[1] / "helpers" / "templates" / "qwen2.5.jinja"
NAMED = re.compile(r"data\.(?:columns=\{.*?\}|format=\w+)")


@pytest.mark.parametrize("name", READ)
def test_what_has_a_known_structure_is_read(name: str):
    row, expected = READ[name]
    assert said(*read_row(row, DataFormat.auto, {})) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 2?", "completion": "4"}, [("user", "2 2?"), ("assistant", "4")]),
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, [("user", "Add.\n2 2"), ("assistant", "4")]),
        ({"instruction": "Add.", "input": "", "output": "4"}, [("user", "Add."), ("assistant", "4")]),
        (
            {"system": "Short.", "instruction": "So?", "output": "5", "history": [["2 2?", "4"]]},
            [("system", "Short."), ("user", "2 2?"), ("assistant", "4"), ("user", "So?"), ("assistant", "5")],
        ),
        ({"messages": CHAT, "prompt": "a", "completion": "b"}, SAID),
    ],
)
def test_two_texts_are_a_conversation_where_that_is_wanted(row: dict[str, Any], expected: list[Any]):
    assert said(*read_row(row, DataFormat.messages, {})) == expected


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": 3}, {"instruction": "a"}])
def test_what_is_no_conversation_and_no_two_texts_is_refused(row: dict[str, Any]):
    with pytest.raises(BadRow, match="no messages; keys are"):
        read_row(row, DataFormat.messages, {})


@pytest.mark.parametrize("name", ADVISED)
def test_the_setting_that_is_named_reads_the_row(name: str):
    row, expected = ADVISED[name]
    with pytest.raises(BadRow) as refused:
        read_row(row, DataFormat.auto, {})
    columns = re.search(r"data\.columns=(\{.*?\})", refused.value.detail)
    data_format = re.search(r"data\.format=(\w+)", refused.value.detail)
    form = DataFormat.auto if data_format is None else DataFormat(data_format[1])
    assert said(*read_row(row, form, {} if columns is None else yaml.safe_load(columns[1]))) == expected


@pytest.mark.parametrize("name", COMPARED)
def test_answers_to_compare_are_read(name: str):
    row, expected = COMPARED[name]
    chosen, rejected = read_answers(row, True, {})
    found = [parts(answer.form, answer.fields) for answer in (chosen, rejected)]
    assert found[0][0] == found[1][0]
    assert (found[0][0], found[0][1], found[1][1]) == expected


def parts(form: DataFormat, row: dict[str, Any]) -> tuple[Any, Any]:
    """Prompt and answer."""
    texts = said(form, row)
    return tuple(texts[-2:]) if form is DataFormat.prompt_completion else (texts[-2][1], texts[-1][1])


@pytest.mark.parametrize("name", ADVISED_PAIRS)
def test_the_setting_that_is_named_reads_the_pair_with_all_of_it(name: str):
    row = ADVISED_PAIRS[name]
    with pytest.raises(BadRow) as refused:
        read_answers(row, True, {})
    columns = re.search(r"data\.columns=(\{.*?\})", refused.value.detail)
    assert columns is not None, refused.value.detail
    chosen, _ = read_answers(row, True, yaml.safe_load(columns[1]))
    for word in (row.get("system"), row["question"], "Four."):
        assert word is None or word in json.dumps(chosen.fields)


TREE = [
    {"message_id": "1", "parent_id": None, "text": "Two and two?", "role": "prompter", "rank": None},
    {"message_id": "2", "parent_id": "1", "text": "Five.", "role": "assistant", "rank": 1},
    {"message_id": "3", "parent_id": "1", "text": "Four.", "role": "assistant", "rank": 0},
    {"message_id": "4", "parent_id": "3", "text": "And three and three?", "role": "prompter", "rank": None},
    {"message_id": "5", "parent_id": "3", "text": "And four and four?", "role": "prompter", "rank": None},
    {"message_id": "6", "parent_id": "4", "text": "Six.", "role": "assistant", "rank": None},
    {"message_id": "7", "parent_id": "5", "text": "Eight.", "role": "assistant", "rank": None},
]


def test_a_tree_of_messages_is_no_text():
    with pytest.raises(BadRow, match=r"one message of a tree.*set data\.format=text"):
        read_row(TREE[2], DataFormat.auto, {})
    assert said(*read_row(TREE[2], DataFormat.text, {})) == ["Four."]


def test_the_script_of_the_documents_joins_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The remedy of the message, followed: each path is a conversation, and each answer is trained on once."""
    with pytest.raises(BadRow) as refused:
        read_row(TREE[2], DataFormat.auto, {})
    name, file = re.findall(r'under "(\w+)" in (\S+\.md)', refused.value.detail)[0]
    documents = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    script = documents[documents.index(f"**{name} of messages") :].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "trees.py").write_text(script)
    write_lines(tmp_path / "messages.jsonl", TREE)
    command = [sys.executable, str(tmp_path / "trees.py"), str(tmp_path / "messages.jsonl")]
    joined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (tmp_path / "rows.jsonl").write_text(joined)
    base = ["model=tiny", "model.tokenizer_path=bytes", "training.max_length=2000", "color=never"]
    assert preview.main([*base, f"data.path={tmp_path / 'rows.jsonl'}", f"data.cache_folder={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "2 rows read, 2 used" in out and "Five." not in out
    trained = re.findall(r"\[\[(.*?)\]\]", out, re.DOTALL)
    assert [sum(word in text for text in trained) for word in ("Four.", "Six.", "Eight.")] == [1, 1, 1]
    assert not any(question["text"] in "".join(trained) for question in TREE if question["role"] == "prompter")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [parse_row(raw) for _, raw in iterate_rows(find_source(str(file), DataConfig()))]


def test_a_list_is_read_under_either_name(tmp_path: Path):
    rows = [{"messages": CHAT}, {"text": "Four."}]
    for name, text in {
        "list.json": json.dumps(rows),
        "indented.json": json.dumps(rows, indent=1),
        "list.jsonl": json.dumps(rows),
        "indented.jsonl": json.dumps(rows, indent=1),
        "lines.json": "\n".join(map(json.dumps, rows)),
        "lines.jsonl": "\n".join(map(json.dumps, rows)) + "\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert rows_of(tmp_path / name) == rows, name


@pytest.mark.parametrize(
    ("found", "indent", "message"),
    [
        ({"version": 1, "data": [{"text": "Four."}]}, None, r"jq -c '\.\[\"data\"\]\[\]'"),
        ({"version": 1, "data": [{"text": "Four."}]}, 1, r"jq -c '\.\[\"data\"\]\[\]'"),
        ({"question": ["a", "b"], "answer": ["c", "d"]}, None, "a list for each column"),
        ({"messages": CHAT}, 1, r"jq -c \. rows\.json > rows\.jsonl"),
    ],
)
def test_an_object_that_holds_the_rows_is_told(tmp_path: Path, found: Any, indent: int | None, message: str):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(found, indent=indent))
    with pytest.raises(DataError, match=message):
        rows_of(file)


def test_a_file_of_one_conversation_holds_a_row(tmp_path: Path):
    row = {"conversation": [{"input": "Two and two?", "output": "Four."}]}
    (tmp_path / "row.json").write_text(json.dumps(row))
    assert rows_of(tmp_path / "row.json") == [row]


def test_letters_of_windows_are_told(tmp_path: Path):
    (tmp_path / "rows.csv").write_bytes("prompt,completion\nGrüße?,Groß.\n".encode("windows-1252"))
    with pytest.raises(BadRow, match="iconv -f WINDOWS-1252"):
        rows_of(tmp_path / "rows.csv")


def show(folder: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], *more: str) -> tuple[int, str, str]:
    """What `preview` says of a row: its exit code, what it prints, and its log or its error."""
    write_lines(folder / "rows.jsonl", [row])
    base = ["model=tiny", "model.tokenizer_path=bytes", "training.max_length=2000", "color=never"]
    code = preview.main([*base, f"data.path={folder / 'rows.jsonl'}", f"data.cache_folder={folder}", *more])
    return code, *capsys.readouterr()


def words_of(said: Any) -> list[str]:
    """All texts in what a row says."""
    if isinstance(said, dict):
        return [word for value in said.values() for word in words_of(value)]
    if isinstance(said, (list, tuple)):
        return [word for value in said for word in words_of(value)]
    return [said] if isinstance(said, str) else []


@pytest.mark.parametrize("name", READ)
def test_preview_shows_what_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row, expected = READ[name]
    code, out, error = show(tmp_path, capsys, row)
    if code == 2:  # the default template knows no calls
        assert "data.chat_template" in error
        code, out, error = show(tmp_path, capsys, row, f"data.chat_template={KNOWS_CALLS}")
    assert code == 0, error
    assert "1 row read, 1 used" in out and "[[" in out
    assert all(text.strip() in out for turn in expected for text in words_of(turn[1:]) if "{" not in text)


@pytest.mark.parametrize("name", ADVISED)
def test_preview_names_the_setting_with_which_it_shows_the_row(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    row, expected = ADVISED[name]
    code, out, error = show(tmp_path, capsys, row)
    assert code == 2 and "Traceback" not in error
    code, out, more = show(tmp_path, capsys, row, *NAMED.findall(error)[:1])
    assert code == 0, error + more
    assert all(text in out for turn in expected for text in words_of(turn[1] if isinstance(turn, tuple) else turn))


@pytest.mark.parametrize("name", [*COMPARED, *ADVISED_PAIRS])
def test_preview_shows_answers_to_compare(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = COMPARED[name][0] if name in COMPARED else ADVISED_PAIRS[name]
    code, out, error = show(tmp_path, capsys, row, "task=preference")
    if name in ADVISED_PAIRS:
        assert code == 2
        code, out, error = show(tmp_path, capsys, row, "task=preference", *NAMED.findall(error)[:1])
    assert code == 0, error
    chosen, _, rejected = out.partition(", rejected")
    assert "Four" in chosen.rpartition("[[")[2] and "Four." not in rejected.rpartition("---")[0].rpartition("[[")[2]


@pytest.mark.parametrize("name", JUDGED)
def test_two_texts_that_are_judged_together(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = ["task=sequence_classification", "task.labels=[yes,no]"]
    code, out, error = show(tmp_path, capsys, JUDGED[name], *settings)
    assert code == 2 and "text_pair" in error
    code, out, error = show(tmp_path, capsys, JUDGED[name], *settings, *NAMED.findall(error)[:1])
    assert code == 0, error
    assert "labels: no" in out and "Two." in out and "Four." in out


def test_two_texts_have_the_tokens_of_a_stock_pipeline():
    tokenizer = byte_tokenizer()
    pairs = LabelledRowTokenizer(tokenizer, TaskConfig(), 100, BadRows.truncate, {})
    problem, tokens, _ = pairs.tokenize("Two.", "Four.")
    assert problem == ("", "") and tokens == tokenizer("Two.", text_pair="Four.")["input_ids"]
    cut = LabelledRowTokenizer(tokenizer, TaskConfig(), 6, BadRows.truncate, {})
    stock = tokenizer("Two.", text_pair="Four.", truncation=True, max_length=6)["input_ids"]
    assert cut.tokenize("Two.", "Four.")[1] == stock and len(stock) == 6


@pytest.mark.parametrize("name", ["Glaive v2: a transcript with a call", "Capybara: pairs of input and output", "xLAM"])
def test_the_command_itself_shows_the_row(name: str, tmp_path: Path):
    row, expected = next(READ[key] for key in READ if key.startswith(name))
    write_lines(tmp_path / "rows.jsonl", [row])
    settings = [f"data.path={tmp_path / 'rows.jsonl'}", f"data.cache_folder={tmp_path}", "training.max_length=2000"]
    settings += ["model=tiny", "model.tokenizer_path=bytes", "color=never", f"data.chat_template={KNOWS_CALLS}"]
    code, printed = run_forked(tmp_path, "preview", *settings)
    assert code == 0, printed
    assert "1 row read, 1 used" in printed
    assert all(word in printed for turn in expected for word in words_of(turn[1:]) if "{" not in word)


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"text": "a"}])
def test_a_column_of_tools_that_are_words_belongs_to_no_conversation(row: dict[str, str]) -> None:
    """Only a conversation has tools, and there such a text is refused."""
    words = {"tools": "hammer, saw"}
    assert read_layout({**row, **words}, DataFormat.auto, {})[0] == {**row, **words}
