"""Conversations: the text that the chat template makes of them, and the characters of it that are trained on."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.calls import write_calls
from qlora_fsdp.data.chats.markers import explain_no_template
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, find_texts, has_generation_marks
from qlora_fsdp.data.chats.turn_kinds import can_trace
from qlora_fsdp.data.chats.turns import find_turns
from qlora_fsdp.data.columns import NOT_TEXT
from qlora_fsdp.data.row import (
    EMPTY,
    NO_TARGET,
    REFUSED,
    WRONG_KEYS,
    BadRow,
    as_template_sees,
    called_name,
    function_of,
    is_trained,
)

ROLES = ("system", "user", "assistant", "tool")  # that templates know
THOUGHTS = ("thinking", "reasoning")

_TAG = re.compile("\ue001([0-9]+)\ue002")  # of Unicode's private use area, which no text should have


def format_messages(
    messages: list[dict[str, Any]], tools: Any, loss_on: LossOn, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, tuple[Span, ...]]:
    """The text of a conversation, and the characters of it that are trained on.

    Raises:
        BadRow: the chat template refuses it, or its assistant turns can't be told from the rest.
        DataError: there is no chat template.
    """
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise DataError(explain_no_template(tokenizer)) from error
    trained = [message["role"] == "assistant" and is_trained(message) for message in messages]
    messages = write_calls([as_template_sees(message) for message in messages], template, tokenizer)
    if loss_on is LossOn.completion:
        _check_answers(messages, trained)
    conversation = Conversation(messages, tools, template, tokenizer)

    has_marks = loss_on is LossOn.completion and has_generation_marks(template)
    trace = _trace(conversation)
    if trace is not None:
        text, marks = trace.text, trace.marks
    else:
        text, marks = conversation.render_marks() if has_marks else (conversation.render(messages), [])
    _check_calls(conversation, text, trace)
    check_written(conversation)
    if loss_on is LossOn.completion:
        _check_fields(conversation, trained)
    if loss_on is LossOn.all:
        return text, ((0, len(text)),)
    spans = _choose_marks(marks, messages, trained) if has_marks else find_turns(conversation, text, trace, trained)
    return text, tuple(spans)


def _trace(conversation: Conversation) -> Trace | None:
    """The one render that a conversation takes; None: the template can't be traced, or refuses the conversation."""
    if not can_trace(conversation.template, conversation.tokenizer):
        return None
    try:
        return conversation.trace()
    except DataError:
        raise
    except Exception:  # transformers' own render tells what is wrong
        return None


def _check_answers(messages: list[dict[str, Any]], trained: list[bool]) -> None:
    """Refuses a conversation that has nothing to train on, or an empty answer to train on."""
    roles = dict.fromkeys(message["role"] for message in messages)
    if "assistant" not in roles:
        raise BadRow(NO_TARGET, f"no message of the assistant (roles: {shorten(', '.join(roles))})")
    if not any(trained):
        raise BadRow(NO_TARGET, "no message of the assistant is to be trained on")
    for number, (message, is_target) in enumerate(zip(messages, trained, strict=True), start=1):
        said = [value for key, value in message.items() if key != "role"]
        if is_target and not any(value.strip() if isinstance(value, str) else value for value in said):
            raise BadRow(EMPTY, f"message {number}, an answer to train on, is empty")


def _check_fields(conversation: Conversation, trained: list[bool]) -> None:
    """Refuses an answer to train on that is nothing but fields that the template does not write, such as thoughts."""
    for number, (message, is_target) in enumerate(zip(conversation.messages, trained, strict=True)):
        if is_target and not message.get("tool_calls") and not str(message.get("content", "")).strip():
            fields = ", ".join(key for key in message if key not in ("role", "content"))
            if _is_same_with(conversation, number, {"role": message["role"], "content": ""}):
                reason = f"message {number + 1}, an answer to train on, is empty, and the chat template leaves out its"
                raise BadRow(EMPTY, f"{reason} {shorten(fields)}")


def _choose_marks(marks: list[Span], messages: list[dict[str, Any]], trained: list[bool]) -> list[Span]:
    """The spans of the template's marks that belong to answers to train on."""
    answers = [
        is_target for is_target, message in zip(trained, messages, strict=True) if message["role"] == "assistant"
    ]
    if all(answers):
        return marks
    if len(marks) != len(answers):
        raise BadRow(NO_TARGET, f"the chat template marks {len(marks)} of {len(answers)} answers, some not to train on")
    return [span for span, is_target in zip(marks, answers, strict=True) if is_target]


def check_written(conversation: Conversation) -> None:
    """Refuses a conversation with images and the like, and one of which the template leaves out a message or a part.

    Many templates write nothing of a message in parts, or of a role that they do not know, so that the model would
    answer a question that it does not see. Thoughts may be left out, as those under names of their own are.

    Raises:
        BadRow: there is such a message.
    """
    known = set(ROLES)
    for number, message in enumerate(conversation.messages):
        role, others = message["role"], {**message, "content": "other words"}
        if role not in known and _is_same_with(conversation, number, others):
            roles = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
            reason = f"it leaves out what message {number + 1} says, of the {role}; write {roles} as its role"
            raise BadRow(REFUSED, f"{reason}, or set data.chat_template to one that has it")
        known.add(role)
        parts = message["content"] if isinstance(message.get("content"), list) else []
        for place, part in enumerate(parts):
            kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
            if any(medium in kind for medium in NOT_TEXT):
                reason = f"message {number + 1} has a part of type {kind}, and training is on text alone"
                raise BadRow(WRONG_KEYS, reason)
            fewer = {**message, "content": [*parts[:place], *parts[place + 1 :]]}
            says = kind not in THOUGHTS and part != {"type": "text", "text": ""}
            if says and _is_same_with(conversation, number, fewer):
                reason = f"it leaves out the part of type {kind} of message {number + 1}"
                raise BadRow(REFUSED, f"{reason}; write text, or set data.chat_template to one that has such parts")


def _is_same_with(conversation: Conversation, number: int, other: dict[str, Any]) -> bool:
    """Whether the template writes a conversation as it does with another message in the place of one."""
    try:
        return conversation.render(conversation.messages) == conversation.render(conversation.replace(number, other))
    except BadRow:  # a template that can't do without it writes it
        return False


def _check_calls(conversation: Conversation, text: str, trace: Trace | None) -> None:
    """Refuses a template that leaves calls of tools out: the model would learn to say nothing where it should call.

    Raises:
        BadRow: a message's calls are left out, or one of them, as gpt-oss's template writes the first one alone.
    """
    calling = [number for number, message in enumerate(conversation.messages) if message.get("tool_calls")]
    if trace is not None:
        calling = [number for number in calling if not _names_call(conversation, trace, number)]
    written = _written_calls(conversation, text, calling) if len(calling) > 1 else set()
    for number in calling:
        if number in written:
            continue
        message = conversation.messages[number]
        calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else []
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        shorter = [{**message, "tool_calls": [*calls[:place], *calls[place + 1 :]]} for place in range(len(calls))]
        for fewer in [{"content": "", **without}, *(shorter if len(calls) > 1 else [])]:
            try:
                is_left_out = text == conversation.render(conversation.replace(number, fewer))
            except BadRow:  # a template that can't do without them writes them
                is_left_out = False
            if is_left_out:
                what = "one of the" if "tool_calls" in fewer else "the"
                fix = "set data.chat_template to one that has them"
                raise BadRow(REFUSED, f"it leaves out {what} tool_calls of message {number + 1}; {fix}")


def _names_call(conversation: Conversation, trace: Trace, number: int) -> bool:
    """Whether the text that a message gave has the name of the one function it calls, which the call alone gives."""
    message, part = conversation.messages[number], trace.parts.get(number)
    name = called_name(message)
    if part is None or name is None or len(message["tool_calls"]) > 1:
        return False
    rest = trace.text[part[0] : part[1]]
    for said in (str(value).strip() for key, value in message.items() if key != "tool_calls"):
        if name in said and said not in rest:
            return False
        rest = rest.replace(said, "") if name in said else rest
    return name in rest and not any(name in text for text in find_texts(conversation.template))


def _written_calls(conversation: Conversation, text: str, calling: list[int]) -> set[int]:
    """The messages all of whose calls are surely in the text.

    One render has a tag after the name of each function that they call. Where the tags are the only difference from the
    text, each message whose tags are there has its calls written. Others are checked one by one.
    """
    messages = list(conversation.messages)
    tags: Counter[int] = Counter()
    for number in calling:
        calls = messages[number]["tool_calls"]
        if isinstance(calls, list):
            tags[number] = len(calls)
            messages[number] = {**messages[number], "tool_calls": [_tag_call(call, number) for call in calls]}
    try:
        tagged = conversation.render(messages)
    except BadRow:  # a template that knows the tools' names
        return set()
    found = Counter(int(number) for number in _TAG.findall(tagged)) if _TAG.sub("", tagged) == text else Counter()
    return {number for number, count in tags.items() if found[number] == count}


def _tag_call(call: Any, number: int) -> Any:
    """The call with a tag after the name of its function, if it has one."""
    function = function_of(call)
    if function is None or not isinstance(function.get("name"), str):
        return call
    tagged = {**function, "name": f"{function['name']}\ue001{number}\ue002"}
    return {**call, "function": tagged} if function is not call else tagged
