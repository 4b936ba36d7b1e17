"""Whether a chat template writes all that a conversation says: each message, each part of one and each call of a tool.

Templates are programs that write what they look for, and nothing of what they do not know: of a role of another name, a
message in parts, the second of two calls. The model would then be trained on answers to questions that it does not see.
So what may be missing is changed or taken out, and where the text stays the same, the template has left it out.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from qlora_fsdp.common.text import shorten
from qlora_fsdp.data.chats.template import Conversation, Trace, find_texts
from qlora_fsdp.data.columns import NOT_TEXT
from qlora_fsdp.data.message import SYSTEM, THOUGHT_PARTS, called_name, function_of
from qlora_fsdp.data.row import EMPTY, REFUSED, WRONG_KEYS, BadRow

ROLES = ("system", "user", "assistant", "tool")  # that templates know
ANOTHER = "set data.chat_template to one that"

_TAG = re.compile("\ue001([0-9]+)\ue002")  # of Unicode's private use area, which no text should have


def check_written(conversation: Conversation, text: str, trace: Trace | None = None) -> None:
    """Refuses a conversation with images and the like, and one of which the template leaves out what it does not know.

    Thoughts may be left out, as those under names of their own are.

    Args:
        conversation: what is written.
        text: what the template makes of it.
        trace: where the text comes from, if that is known.

    Raises:
        BadRow: a message of a role of another name is left out, a part of a message, or a call of a tool.
    """
    _check_calls(conversation, text, trace)
    for role, number in _first_messages(conversation).items():
        if role not in ROLES and _leaves_out_words(conversation, text, number):
            fix = f"write {', '.join(ROLES[:-1])} or {ROLES[-1]} as its role, or {ANOTHER} has it"
            raise BadRow(REFUSED, f"it leaves out {_words(number, role)}; {fix}")
    for number in range(len(conversation.messages)):
        _check_parts(conversation, text, number)


def check_words(conversation: Conversation, text: str) -> None:
    """Refuses a conversation with a message of whose words the template writes nothing.

    It may leave out the system message once it is answered, as Mistral's do, or look for words in other fields.

    Args:
        conversation: what is written.
        text: what the template makes of it.

    Raises:
        BadRow: there is such a message.
    """
    last, numbers = len(conversation.messages) - 1, set(_first_messages(conversation).values())
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message.get("content")
        if role == "assistant":  # of earlier answers templates leave out what they do not repeat
            may_lack = number == last and not message.get("tool_calls")
        else:  # some templates write the first system message alone
            may_lack = number in numbers or role in SYSTEM
        if not may_lack or not isinstance(content, str) or _last_line(content) in text:
            continue  # as nearly always
        if not _leaves_out_words(conversation, text, number):
            continue
        if role in SYSTEM and number == 0:
            raise BadRow(REFUSED, "it leaves out the system message; put that into the first message of the user")
        raise BadRow(REFUSED, f"it leaves out {_words(number, role)}; {ANOTHER} has it")


def check_last_answer(conversation: Conversation, text: str) -> None:
    """Refuses a conversation of whose last message, an answer, the template writes nothing.

    Raises:
        BadRow: it is so.
    """
    number = len(conversation.messages) - 1
    message = conversation.messages[number]
    content = message.get("content")
    if message["role"] != "assistant" or message.get("tool_calls") or not isinstance(content, str):
        return
    if _last_line(content) not in text and _leaves_out_words(conversation, text, number):
        raise BadRow(REFUSED, f"it leaves out {_words(number, 'assistant')}; {ANOTHER} has it")


def check_fields(conversation: Conversation, text: str, trained: list[bool]) -> None:
    """Refuses an answer to train on that is nothing but fields that the template does not write, such as thoughts.

    Raises:
        BadRow: there is such an answer.
    """
    for number, (message, is_target) in enumerate(zip(conversation.messages, trained, strict=True)):
        if is_target and not message.get("tool_calls") and not str(message.get("content", "")).strip():
            fields = ", ".join(key for key in message if key not in ("role", "content"))
            if _is_same_with(conversation, text, number, {"role": message["role"], "content": ""}):
                reason = f"message {number + 1}, an answer to train on, is empty, and the chat template leaves out its"
                raise BadRow(EMPTY, f"{reason} {shorten(fields)}")


def _is_same_with(conversation: Conversation, text: str, number: int, other: dict[str, Any]) -> bool:
    """Whether the template writes the same text with another message in the place of one."""
    try:
        return conversation.render(conversation.replace(number, other)) == text
    except BadRow:  # a template that can't do without it writes it
        return False


def _first_messages(conversation: Conversation) -> dict[str, int]:
    """The number of the first message of each role. A template writes those of a role alike."""
    numbers: dict[str, int] = {}
    for number, message in enumerate(conversation.messages):
        numbers.setdefault(message["role"], number)
    return numbers


def _leaves_out_words(conversation: Conversation, text: str, number: int) -> bool:
    return _is_same_with(conversation, text, number, {**conversation.messages[number], "content": "other words"})


def _words(number: int, role: str) -> str:
    return f"what message {number + 1} says, of the {role}"


def _last_line(content: str) -> str:
    """What a template surely writes of a message, if anything: it may drop thoughts, and spaces around the rest."""
    return content.rpartition("</think>")[2].strip().rpartition("\n")[2]


def _check_parts(conversation: Conversation, text: str, number: int) -> None:
    """Refuses a message with a part that is not text, or of which the template writes nothing."""
    message = conversation.messages[number]
    parts = message["content"] if isinstance(message.get("content"), list) else []
    for place, part in enumerate(parts):
        kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
        if any(medium in kind for medium in NOT_TEXT):
            reason = f"message {number + 1} has a part of type {kind}, and training is on text alone"
            raise BadRow(WRONG_KEYS, reason)
        fewer = {**message, "content": [*parts[:place], *parts[place + 1 :]]}
        says = kind not in THOUGHT_PARTS and part != {"type": "text", "text": ""}
        if says and _is_same_with(conversation, text, number, fewer):
            reason = f"it leaves out the part of type {kind} of message {number + 1}"
            raise BadRow(REFUSED, f"{reason}; write text, or {ANOTHER} has such parts")


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
        # A template may write "" as a space and what is missing as nothing, or need content where there are no calls.
        others = [without] if "content" in without else [without, {**without, "content": ""}]
        shorter = [{**message, "tool_calls": [*calls[:place], *calls[place + 1 :]]} for place in range(len(calls))]
        for fewer in [*others, *(shorter if len(calls) > 1 else [])]:
            if _is_same_with(conversation, text, number, fewer):
                what = "one of the" if "tool_calls" in fewer else "the"
                raise BadRow(REFUSED, f"it leaves out {what} tool_calls of message {number + 1}; {ANOTHER} has them")


def _names_call(conversation: Conversation, trace: Trace, number: int) -> bool:
    """Whether the text that a message gave has the name of the one function it calls, which the call alone gives."""
    message, pieces = conversation.messages[number], trace.parts.get(number, [])
    name = called_name(message)
    if not pieces or name is None or len(message["tool_calls"]) > 1:
        return False
    rest = "".join(trace.text[start:end] for start, end in pieces)
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
