"""The thoughts of answers, which stand in a field of their own, in parts of the content, or before the words."""

from __future__ import annotations

from typing import Any

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message that templates have for its thoughts
PARTS = ("thinking", "reasoning")  # types of parts of a content
BEGIN, END = "<think>", "</think>"


def find_thoughts(message: dict[str, Any]) -> str:
    """The thoughts of an answer, which stand in a field of their own or before its words; empty if it has none."""
    for key in REASONING:
        if message.get(key):
            return str(message[key]).strip()
    before, _, _ = str(message.get("content")).rpartition(END)
    return before.rpartition(BEGIN)[2].strip()


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that has no thoughts in any of these places; another message as it is."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key not in REASONING}
    content = rest.get("content")
    if isinstance(content, str) and END in content:
        rest["content"] = content.rpartition(END)[2].lstrip("\n")
    elif isinstance(content, list):
        rest["content"] = [part for part in content if not (isinstance(part, dict) and part.get("type") in PARTS)]
    return rest
