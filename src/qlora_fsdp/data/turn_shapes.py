"""Shapes in which data sets write the turns of a conversation, and the messages that they are.

Everything here tells a shape by how a value is built, never by whose data it is. A value of another shape stays as it
is, for `check_row` to judge.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from qlora_fsdp.data.columns import COMMON_NAMES
from qlora_fsdp.data.row import parse_json_text

Message = dict[str, Any]

# What a pair of a question and its answer may call these.
ASKED = (*COMMON_NAMES["prompt"], "human")
ANSWERED = (*COMMON_NAMES["completion"], "gpt", "bot", "model")

# The labels of a transcript, {"text": "Human: ...\n\nAssistant: ..."}, each at the beginning of a line.
LABELS = {
    "human": "user",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "function response": "tool",
}
_LABEL = re.compile(r"(?:^|\n)[ \t]*(?:### ?)?(human|user|assistant|system|function response):[ \t]?", re.IGNORECASE)
_CALL = "<functioncall>"
_END = "<|endoftext|>"
# A call whose arguments are JSON between single quotes, which is no JSON as a whole.
_QUOTED_CALL = re.compile(r"\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*'(.*)'\s*\}\s*$", re.DOTALL)


def read_turns(value: Any) -> Any:
    """The turns of a conversation as messages, if they have one of the shapes below; else the value.

    - Pairs: [{"input": ..., "output": ...}, ...] or [[question, answer], ...]
    - Parts: [{"role": "model", "parts": [{"text": ...}]}, ...], as Google's API has them
    - Messages with parts of tools (`tool_use`, `tool_result`), as Anthropic's API has them
    """
    if not isinstance(value, list):
        return value
    pairs = [_read_pair(turn) for turn in value]
    if all(pairs):
        return list(itertools.chain.from_iterable(pairs))
    if not is_list_of_mappings(value):
        return value
    if all(_is_of_google(turn) for turn in value):
        return [_from_parts(turn) for turn in value]
    if any(_has_tool_part(turn) for turn in value):
        return _from_tool_parts(value)
    return value


def read_texts(value: Any) -> Any:
    """Texts that are said in turn, the user's first, as messages; else the value."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        return value
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(value)]


def is_transcript(text: Any) -> bool:
    """Whether a text is a conversation whose turns begin with labels: the user's before one of the assistant."""
    if not isinstance(text, str):
        return False
    roles = [LABELS[match[1].lower()] for match in _LABEL.finditer(text)]
    return "user" in roles and "assistant" in roles[roles.index("user") :]


def read_transcript(text: str) -> list[Message]:
    """The messages of a transcript. What its turns say of calls (`<functioncall> {...}`) becomes calls of tools.

    Raises:
        BadRow: a call can't be read.
    """
    labels = list(_LABEL.finditer(text))
    ends = [label.start() for label in labels[1:]] + [len(text)]
    messages: list[Message] = []
    for label, end in zip(labels, ends, strict=True):
        role = LABELS[label[1].lower()]
        said = text[label.end() : end].replace(_END, "").strip()
        if role == "assistant" and _CALL in said:
            messages.append(_read_call(said))
        else:
            messages.append({"role": role, "content": said})
    return messages


def begins_answer(text: str, shared: int) -> int | None:
    """Where the answer begins of a transcript that shares its first `shared` characters with another; None: it is none.

    That is behind the last label in what they share, if it is the assistant's.
    """
    labels = [match for match in _LABEL.finditer(text) if match.end() <= shared]
    if not labels or LABELS[labels[-1][1].lower()] != "assistant":
        return None
    label = labels[-1]
    return label.start() + len(label.group().rstrip())  # a space before a word is part of the word


def _read_call(said: str) -> Message:
    """What the assistant says, with the call of a tool at its end."""
    words, _, call = said.partition(_CALL)
    call = call.strip()
    quoted = _QUOTED_CALL.match(call)
    if quoted is not None:
        function: Any = {"name": quoted[1], "arguments": quoted[2]}
    else:
        function = parse_json_text(f"what stands after {_CALL} is text", call)
    return {"role": "assistant", "content": words.strip(), "tool_calls": [{"type": "function", "function": function}]}


def _read_pair(turn: Any) -> list[Message]:
    """A question and its answer; empty: a turn is no such pair."""
    said = turn
    if isinstance(turn, dict):
        said = _values_of_pair(turn)
    if not isinstance(said, list) or len(said) != 2 or not all(isinstance(text, str) for text in said):
        return []
    question, answer = said
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _values_of_pair(turn: Message) -> list[Any]:
    """What a turn has under a question's key and under an answer's; empty: it has a role, or not one key of each."""
    asked = [key for key in turn if key.lower() in ASKED]
    answered = [key for key in turn if key.lower() in ANSWERED]
    has_role = "role" in turn or "from" in turn
    if has_role or len(asked) != 1 or len(answered) != 1:
        return []
    return [turn[asked[0]], turn[answered[0]]]


def _is_of_google(turn: Message) -> bool:
    return "role" in turn and isinstance(turn.get("parts"), list)


def _from_parts(turn: Message) -> Message:
    """A turn of Google's API as a message. Parts that are no text stay, and are refused."""
    role = "assistant" if turn["role"] == "model" else turn["role"]
    content = [
        {"type": "text", **part} if isinstance(part, dict) and set(part) == {"text"} else part for part in turn["parts"]
    ]
    return {"role": role, "content": content}


def _has_tool_part(turn: Message) -> bool:
    content = turn.get("content")
    if not isinstance(content, list):
        return False
    kinds = [part.get("type") for part in content if isinstance(part, dict)]
    return "tool_use" in kinds or "tool_result" in kinds


def _from_tool_parts(turns: list[Message]) -> list[Message]:
    """Messages of Anthropic's API: calls and their answers are parts of messages there, and no messages."""
    messages: list[Message] = []
    names: dict[Any, Any] = {}  # of functions, by the ids of their calls
    for turn in turns:
        content = turn.get("content")
        if not isinstance(content, list):
            messages.append(turn)
            continue
        rest: list[Any] = []
        calls: list[Message] = []
        thoughts: list[str] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "tool_use":
                names[part.get("id")] = part.get("name")
                function = {"name": part.get("name"), "arguments": part.get("input", {})}
                calls.append({"type": "function", "id": part.get("id"), "function": function})
            elif kind == "tool_result":
                messages.append(_read_result(part, names))
            elif kind == "thinking" and isinstance(part.get("thinking"), str):
                thoughts.append(part["thinking"])
            else:
                rest.append(part)
        if calls:
            message = {**turn, "content": rest or "", "tool_calls": calls}
            if thoughts:
                message["reasoning_content"] = "\n".join(thoughts)
            messages.append(message)
        elif thoughts:
            messages.append(turn)
        elif rest:
            messages.append({**turn, "content": rest})
    return messages


def _read_result(part: Message, names: dict[Any, Any]) -> Message:
    """The answer of a tool, a part of a user's message, as a message of its own."""
    number = part.get("tool_use_id")
    result = part.get("content", "")
    content = result if isinstance(result, (str, list)) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": number, "name": names.get(number), "content": content}


def read_tools(value: Any) -> Any:
    """Tools with an `input_schema`, as Anthropic's API has them, as functions with parameters; else the value."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return value
    return [_read_tool(tool) for tool in value]


def _read_tool(tool: Message) -> Message:
    if "input_schema" not in tool or "function" in tool:
        return tool
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


# Names of types as Python writes them, and as JSON schemas do.
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def as_function(tool: Any) -> Any:
    """A tool {"name": ..., "parameters": {name: {"type": ..., ...}}} as a function with a JSON schema."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    parameters = tool.get("parameters")
    if isinstance(parameters, dict) and _are_by_name(parameters):
        tool = {**tool, "parameters": _schema_of(parameters)}
    return {"type": "function", "function": tool}


def _are_by_name(parameters: Mapping[str, Any]) -> bool:
    """Whether parameters are a dict for each name, and no JSON schema."""
    return "properties" not in parameters and all(isinstance(value, dict) for value in parameters.values())


def _schema_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of parameters by name, whose types are written as in Python. What may be left out says so."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, value in parameters.items():
        written = str(value.get("type", ""))
        kind = re.split(r"[\[\],\s]", written.lower().removeprefix("optional["), maxsplit=1)[0]
        properties[name] = {**value, "type": _TYPES.get(kind, kind)} if written else value
        if "default" not in value and "optional" not in written:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def find_objects(text: str) -> tuple[str, list[Message]]:
    """The JSON objects that stand in a text, one after another, and the text before them."""
    start = re.search(r"^\s*\{", text, re.MULTILINE)
    if start is None:
        return text, []
    found: list[Message] = []
    position = text.index("{", start.start())
    decoder = json.JSONDecoder()
    while position < len(text):
        try:
            item, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return text, []  # what follows is no tool, and all of it stays text
        if not isinstance(item, dict):
            return text, []
        found.append(item)
        position = end
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
    return text[: start.start()].strip(), found


def is_list_of_turns(value: Any) -> bool:
    """Whether a value is a list of messages, of ShareGPT's turns, or of a shape that `read_turns` knows."""
    turns = read_turns(value)
    return is_list_of_mappings(turns) and all("role" in turn or "from" in turn for turn in turns)


def is_list_of_mappings(value: Any) -> bool:
    """Whether a value is a list with one dict or more, and nothing else."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
