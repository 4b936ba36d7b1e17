"""Small conversations that stand for real ones: with a turn of the same kind, and a word for all that it says."""

from __future__ import annotations

import json
from typing import Any

from qlora_fsdp.data.chats.calls import ANSWER, ASSISTANT, CALL, NEXT_USER, SYSTEM, USER, WORD, Message
from qlora_fsdp.data.chats.template import find_words
from qlora_fsdp.data.message import function_of

MAX_PIECES = 16  # of markup in one message


def followed(calls: bool) -> tuple[list[Message], list[Message]]:
    """A conversation that ends with an answer, or with a call of a tool, and the messages that may follow it."""
    if not calls:
        return [USER, ASSISTANT], [NEXT_USER, {**ASSISTANT, "content": "last"}]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [SYSTEM, USER, call], [{**ANSWER, "tool_call_id": CALL["id"]}, ASSISTANT]


def make_example(
    messages: list[Message], number: int, last_user: int, template: str
) -> tuple[list[Message], int] | None:
    """A small conversation with a turn of the kind of `messages[number]`, and its number there; None: there is none."""
    before = messages[number - 1]["role"] if number else None
    after = messages[number + 1]["role"] if number + 1 < len(messages) else None
    turn = _shorten(messages[number], template)
    if turn is None or before not in ("user", "tool") or after not in ("user", "tool", None):
        return None
    calls = turn.get("tool_calls") or []
    if after is not None and bool(calls) != (after == "tool"):
        return None
    example = [SYSTEM, USER] if messages[0]["role"] == "system" else [USER]
    if before == "tool":
        example += [{**ASSISTANT, "content": "", "tool_calls": [CALL]}, {**ANSWER, "tool_call_id": CALL["id"]}]
    place = len(example)
    example.append(turn)
    if after == "tool":
        example += [{**ANSWER, "tool_call_id": call.get("id", CALL["id"])} for call in calls] + [ASSISTANT]
    if number < last_user:
        example += [NEXT_USER, {**ASSISTANT, "content": "last"}]
    return example, place


def _shorten(message: Message, template: str) -> Message | None:
    """A message of the same kind with a word for all that it says; None: it is of no kind that has an example."""
    short: Message = {}
    for key, value in message.items():
        if key == "role":
            short[key] = value
        elif key == "tool_calls":
            calls = [_shorten_call(call) for call in value] if isinstance(value, list) else [None]
            if None in calls:
                return None
            short[key] = calls
        elif isinstance(value, str):
            text = _shorten_text(value, template)
            if text is None:
                return None
            short[key] = text
        elif key == "content" or (key in template and not isinstance(value, bool)):
            return None
        elif isinstance(value, bool):
            short[key] = value
    return short


def _shorten_call(call: Any) -> Message | None:
    function = function_of(call)
    if function is None or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = {"x": WORD} if arguments else {}
    elif isinstance(arguments, str):
        arguments = json.dumps({"x": WORD}) if arguments.startswith("{") else WORD
    else:
        return None
    short = {"name": "f", **({"arguments": arguments} if "arguments" in function else {})}
    more = {key: "1" * len(call[key]) for key in ("id",) if isinstance(call.get(key), str) and len(call[key]) < 64}
    more |= {key: call[key] for key in ("type",) if isinstance(call.get(key), str)}
    return {**more, "function": short} if function is not call else {**more, **short}


def _shorten_text(text: str, template: str) -> str | None:
    """A text with a word in the place of all that is neither space at its edges nor markup that the template knows."""
    words = find_words(template)
    if words is None or not words.search(text):
        return _shorten_piece(text)
    pieces, end = [], 0
    for match in words.finditer(text):
        pieces += [_shorten_piece(text[end : match.start()]), match.group()]
        end = match.end()
    pieces.append(_shorten_piece(text[end:]))
    return "".join(pieces) if len(pieces) <= MAX_PIECES else None


def _shorten_piece(text: str) -> str:
    said = text.strip()
    if not said:
        return text[:8]
    start = text.index(said)
    return text[:start][-4:] + WORD + text[start + len(said) :][:4]
