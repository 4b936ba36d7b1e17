"""What a message of a conversation says of itself: its role, what it calls and thinks, whether it is trained on."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

SYSTEM = ("system", "developer")  # roles

# Keys of a message that say whether it is trained on: the first is ours, `training` Axolotl's and `loss` ms-swift's.
TRAIN_KEYS = ("train", "weight", "training", "loss")
PART_KEY = "train_detail"  # of Axolotl's: which characters of a message are trained on
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message that templates have for its thoughts
THOUGHT_PARTS = ("thinking", "reasoning")  # types of parts of a content
BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"


def role_of(turn: Any) -> Any:
    """The role of a message; None: it has none."""
    return turn.get("role") if isinstance(turn, dict) else None


def is_trained(message: dict[str, Any]) -> bool:
    """Whether a message of the assistant is trained on: it is, unless it says `train: false`, `weight: 0` or alike."""
    return all(message.get(key) is None or bool(message[key]) for key in TRAIN_KEYS)


def function_of(call: Any) -> dict[str, Any] | None:
    """The function of a call or of a tool, which has it under `function` or is it itself; None: it has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else None


def called_name(message: dict[str, Any]) -> str | None:
    """The name of the function that a message calls first; None: it calls none that has a name."""
    calls = message.get("tool_calls")
    function = function_of(calls[0]) if isinstance(calls, list) and calls else None
    name = None if function is None else function.get("name")
    return name if isinstance(name, str) and name else None


def as_template_sees(message: dict[str, Any]) -> dict[str, Any]:
    """A message without fields that are null, as templates test whether a field is there, and without `train`."""
    return {key: value for key, value in message.items() if value is not None and key not in TRAIN_KEYS}


def last_lines_of(message: dict[str, Any]) -> list[str]:
    """The last line of each thing that a message says, as templates may write it: its words, and what it calls.

    A message without words says its other fields, such as thoughts. A line with quotes or backslashes is there as JSON
    has it too. None of the lines is empty.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [part.get("text") for part in parts if isinstance(part, dict)]
    said += called_values(message)
    has_words = any(isinstance(text, str) and text.strip() for text in said)
    if not has_words:
        said = [value for key, value in message.items() if key != "role"]
    lines: list[str] = []
    for text in said:
        if isinstance(text, str) and text.strip():
            lines.append(text.strip().rpartition("\n")[2].strip())
    escaped = [json.dumps(line, ensure_ascii=False)[1:-1] for line in lines if "\\" in line or '"' in line]
    return lines + escaped


def called_values(message: dict[str, Any]) -> list[str]:
    """The names of the functions that a message calls, and all names and values of their arguments, as text.

    Arguments that are JSON text are there as a whole too.
    """
    calls = message.get("tool_calls")
    found: list[str] = []
    for call in calls if isinstance(calls, list) else []:
        function = function_of(call) or {}
        name = function.get("name")
        arguments = function.get("arguments")
        if isinstance(name, str):
            found.append(name)
        if isinstance(arguments, str):
            found.append(arguments)
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found += _leaves_of(arguments)
    return found


def _leaves_of(value: Any) -> list[str]:
    """All names, texts and numbers in a JSON value, as text."""
    found: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found.append(str(key))
            found += _leaves_of(item)
    elif isinstance(value, list):
        for item in value:
            found += _leaves_of(item)
    elif isinstance(value, str):
        found.append(value)
    else:
        found.append(json.dumps(value))
    return found


def find_thoughts(message: dict[str, Any]) -> str:
    """The thoughts of an answer, which stand in a field of their own or before its words; empty if it has none."""
    for key in REASONING:
        if message.get(key):
            return str(message[key]).strip()
    before, _, _ = str(message.get("content")).rpartition(END_THOUGHT)
    return before.rpartition(BEGIN_THOUGHT)[2].strip()


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that has no thoughts in any of these places; another message as it is."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key not in REASONING}
    content = rest.get("content")
    if isinstance(content, str) and END_THOUGHT in content:
        rest["content"] = content.rpartition(END_THOUGHT)[2].lstrip("\n")
    elif isinstance(content, list):
        rest["content"] = [
            part for part in content if not (isinstance(part, dict) and part.get("type") in THOUGHT_PARTS)
        ]
    return rest
