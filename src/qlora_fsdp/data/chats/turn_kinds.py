"""What a chat template writes around the assistant's turns, learned from small conversations of the same kinds.

A conversation has few kinds of turns: an answer to a user, a call after the answer of a tool, the last answer. What
stands before and after the words of a turn, such as its header, depends on its kind and not on its words. So for each
kind a small conversation is made that has a turn of that kind, and is looked at turn by turn (`rendered_turn`). That
happens once in a process. The turns of real conversations are then found in the text of a single render, and each of
them is checked: around the words there must be what the small conversation has there.

Data sets with turns that no small conversation stands for (images, other roles, two answers in a row) lose nothing but
that speed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.chats.calls import (
    ANSWER,
    ASSISTANT,
    CALL,
    NEXT_USER,
    SYSTEM,
    TOOLS,
    USER,
    WORD,
    Message,
    write_calls,
)
from qlora_fsdp.data.chats.rendered_turn import find_turn
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, find_words
from qlora_fsdp.data.message import function_of
from qlora_fsdp.data.row import BadRow

MAX_PIECES = 16  # of markup in one message


@dataclass(frozen=True)
class Edges:
    """The text that a template writes around the turns of a kind.

    Attributes:
        head: between the beginning of the message's part of the text and the turn.
        tail: between the end of the turn and the end of the part.
        beyond: the end of the turn, where the template writes that after the part.
    """

    head: str
    tail: str
    beyond: str = ""

    def find(self, text: str, part: Span, said: str) -> Span | None:
        """The turn in the message's part of the text; None: something else is around it, or what it said not in it."""
        start, end = part[0] + len(self.head), part[1] - len(self.tail)
        is_framed = text.startswith(self.head, part[0]) and text.endswith(self.tail, start, part[1])
        if end < start or not is_framed or not text.startswith(self.beyond, part[1]):
            return None
        end += len(self.beyond)
        return (start, end) if start < end and text.find(said, start, end) >= 0 else None


def said_in(message: Message) -> str:
    """The words of a message; empty where it has none, or has them in parts."""
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def last_line(said: str) -> str:
    """What is left of words of which a template leaves some out, such as thoughts."""
    return said.rpartition("\n")[2]


def find_by_kind(conversation: Conversation, trace: Trace, turns: list[int]) -> dict[int, Span]:
    """The turns of a traced conversation that are of a known kind and look like it, by the number of the message."""
    messages, template = conversation.messages, conversation.template
    words = find_words(template)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    says_markup = words is not None and any(words.search(str(messages[number].get("content"))) for number in users)
    roles = {message["role"] for message in messages[1 if messages[0]["role"] == "system" else 0 :]}
    if says_markup or not roles <= {"user", "assistant", "tool"}:
        return {}
    special_tokens = tuple(conversation.tokenizer.special_tokens_map.items())
    found = {}
    for number in turns:
        part = trace.parts.get(number)
        example = _example(messages, number, users[-1] if users else -1, template)
        if part is None or example is None:
            continue
        small, place = json.dumps(example[0]), example[1]
        edges = _learn(small, place, bool(conversation.tools), template, conversation.tokenizer, special_tokens)
        said = said_in(messages[number])
        said = last_line(said) if words is not None and words.search(said) else said
        span = None if edges is None else edges.find(trace.text, part, said)
        if span is not None:
            found[number] = span
    return found


@lru_cache(maxsize=64)
def can_trace(template: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tracing small conversations gives the text, and the marks, that transformers gives."""
    is_proven, call = False, {**ASSISTANT, "tool_calls": [CALL]}
    for messages in ([USER, ASSISTANT, NEXT_USER, ASSISTANT], [SYSTEM, USER, call, ANSWER, ASSISTANT]):
        for tools in (None, TOOLS):
            conversation = Conversation(messages, tools, template, tokenizer)
            try:
                expected = conversation.render_marks()
            except BadRow:
                continue
            try:
                trace = conversation.trace()
            except Exception:
                return False
            if (trace.text, trace.marks) != expected:
                return False
            is_proven = True
    return is_proven


@lru_cache(maxsize=4096)
def _learn(
    example: str,
    number: int,
    has_tools: bool,
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    special_tokens: tuple[tuple[str, Any], ...],  # of the tokenizer, which may get others
) -> Edges | None:
    """Find the text around turn `number` of a small conversation, `example`; None if it can't be found."""
    messages = write_calls(json.loads(example), template, tokenizer)
    conversation = Conversation(messages, TOOLS if has_tools else None, template, tokenizer)
    try:
        text, trace = conversation.render(messages), conversation.trace()
        span, part = find_turn(conversation, text, number), trace.parts.get(number)
    except DataError:
        raise
    except Exception:  # of any type; the conversation itself is rendered turn by turn then
        return None
    if trace.text != text or span is None or part is None or not part[0] <= span[0] <= part[1]:
        return None
    return Edges(text[part[0] : span[0]], text[span[1] : part[1]], text[part[1] : span[1]])


def _example(messages: list[Message], number: int, last_user: int, template: str) -> tuple[list[Message], int] | None:
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
