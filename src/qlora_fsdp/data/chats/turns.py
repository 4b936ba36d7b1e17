"""Where the assistant's turns are in the text of a conversation, if the template does not mark them.

A turn is found by rendering the conversation up to it and up to its end (`rendered_turn`). That is two renders per
turn, and long conversations have hundreds of turns. So most turns are found otherwise, in one render that records which
part of the text came from which message: by what the template writes around turns of their kind in small conversations
(`turn_kinds`), or else around the first and the last turn of their kind in the conversation itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from qlora_fsdp.data.chats.rendered_turn import find_call, find_turn
from qlora_fsdp.data.chats.template import Conversation, Span, Trace
from qlora_fsdp.data.chats.turn_kinds import Edges, find_by_kind, last_line, said_in
from qlora_fsdp.data.row import NO_TARGET, BadRow


def find_turns(conversation: Conversation, text: str, trace: Trace | None, trained: list[bool]) -> list[Span]:
    """The assistant's turns to train on, each with its end marker, in the text of the whole conversation.

    Raises:
        BadRow: a turn can't be told from the rest.
    """
    turns = [number for number, is_target in enumerate(trained) if is_target]
    spans: dict[int, Span] = {}
    if trace is not None:
        spans = find_by_kind(conversation, trace, turns)
        spans |= _find_alike(conversation, trace, [number for number in turns if number not in spans])
    written = _without_dropped(conversation, text, trace) if len(spans) < len(turns) else conversation
    for number in turns:
        span = spans.get(number) or find_turn(written, text, number) or find_call(written, trace, number)
        if span is None:
            raise BadRow(
                NO_TARGET,
                f"the chat template has no {{% generation %}} marks, and renders message {number + 1} so that it"
                " can't be told from the rest; set data.chat_template to one with marks, or data.loss_on=all",
            )
        spans[number] = span
    return [spans[number] for number in turns]


def _without_dropped(conversation: Conversation, text: str, trace: Trace | None) -> Conversation:
    """The conversation without the words of those calls of tools of which the template writes the call alone.

    gpt-oss's does where an answer follows, and would write them in the conversation up to the call.
    """
    parts = {} if trace is None else trace.parts
    for number, message in enumerate(conversation.messages):
        silent = {"role": message["role"], "content": "", "tool_calls": message.get("tool_calls")}
        part = text[slice(*parts.get(number, (0, 0)))]
        said = [value for key, value in message.items() if key not in silent or key == "content"]
        if not silent["tool_calls"] or all(str(value).strip() in part for value in said):
            continue
        messages = conversation.replace(number, silent)
        with suppress(BadRow):  # it does not know an empty content
            if conversation.render(messages) == text:
                conversation = replace(conversation, messages=messages)
    return conversation


def _find_alike(conversation: Conversation, trace: Trace, turns: list[int]) -> dict[int, Span]:
    """Finds the turns of each kind of which there are three or more, without rendering each.

    `find_turn` finds the first and the last turn of a kind. Each of them is a part of the text without some characters
    at its beginning and end, such as the header of the turn. If both leave out the same characters, the turns between
    them leave them out too. Turns that do not begin and end with these characters, or do not have
    the last line of what the message says, are missing from the result.
    """
    messages = conversation.messages
    kinds: dict[tuple[Any, ...], list[int]] = {}
    last_user = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number in turns:
        kinds.setdefault(_kind(messages, number, last_user), []).append(number)
    text, parts = trace.text, trace.parts
    spans: dict[int, Span] = {}
    for first, *others, last in (numbers for numbers in kinds.values() if len(numbers) > 2):
        edges: set[Edges] = set()
        for number in (first, last):
            try:
                span, part = find_turn(conversation, text, number), parts.get(number)
            except BadRow:  # raised again in the order of the turns
                break
            if span is None or part is None or not part[0] <= span[0] < span[1] <= part[1]:
                break
            spans[number] = span
            edges.add(Edges(text[part[0] : span[0]], text[span[1] : part[1]]))
        else:
            if len(edges) == 1:
                around = edges.pop()
                for number in others:
                    part = parts.get(number)
                    if part and (span := around.find(text, part, last_line(said_in(messages[number])))):
                        spans[number] = span
    return spans


def _kind(messages: list[dict[str, Any]], number: int, last_user: int) -> tuple[Any, ...]:
    """Everything but its words that a template looks at when it writes a message."""
    message = messages[number]
    before = messages[number - 1]["role"] if number else None
    after = messages[number + 1]["role"] if number + 1 < len(messages) else None
    content = message.get("content")
    is_empty = not content.strip() if isinstance(content, str) else type(content)
    return before, after, number > last_user, is_empty, frozenset(message), bool(message.get("tool_calls"))
