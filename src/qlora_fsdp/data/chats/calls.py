"""How a chat template wants calls of tools.

Data has the arguments of a call as an object, or as the text that OpenAI's API gives. Most templates write an object as
JSON, and would write text as JSON once more; DeepSeek's write text alone. Most know messages without content, some
refuse them, and that of DeepSeek-R1's distills writes calls only where content is null. A template gets the form in
which it writes a small conversation, whatever the data has.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.data.chats.template import Conversation
from qlora_fsdp.data.message import function_of
from qlora_fsdp.data.row import BadRow

Message = dict[str, Any]

# Of small conversations. What these messages say differs, because templates look for a message among others.
WORD = "word"
SYSTEM: Message = {"role": "system", "content": "rules"}
USER: Message = {"role": "user", "content": "question"}
NEXT_USER: Message = {"role": "user", "content": "next"}
ASSISTANT: Message = {"role": "assistant", "content": "reply"}
ANSWER: Message = {"role": "tool", "name": "f", "content": "result"}
# Nine letters and digits, because Mistral's templates refuse other ids.
CALL: Message = {"type": "function", "id": "abcde1234", "function": {"name": "f", "arguments": {"x": WORD}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": WORD, "parameters": {"type": "object"}}}]


class CallForm(NamedTuple):
    """What a template wants."""

    text_arguments: bool  # JSON, and no object
    no_words: Message  # what a call without words has in their place


FORMS = [CallForm(is_text, words) for is_text in (False, True) for words in ({}, {"content": ""}, {"content": None})]


def write_calls(messages: list[Message], template: str, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """The messages with calls of tools as the template wants them. Arguments that are no JSON object stay."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    form = _find_form(template, tokenizer)
    return [_write(message, form) if message.get("tool_calls") else message for message in messages]


@lru_cache(maxsize=64)
def _find_form(template: str, tokenizer: PreTrainedTokenizerBase) -> CallForm:
    call, answer = {"role": "assistant", "tool_calls": [CALL]}, {**ANSWER, "tool_call_id": CALL["id"]}
    for form in FORMS:
        messages = [USER, _write(call, form), answer, ASSISTANT]
        try:
            text = Conversation(messages, None, template, tokenizer).render(messages)
        except BadRow:
            continue
        if WORD in text and str(CALL["function"]["arguments"]) not in text:  # a dictionary as Python shows it
            return form
    return FORMS[0]


def _write(message: Message, form: CallForm) -> Message:
    calls = message["tool_calls"]
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_write_call(call, form) for call in calls]}
    return message if message.get("content") else {**message, **form.no_words}


def _write_call(call: Any, form: CallForm) -> Any:
    function = function_of(call)
    if function is None or "arguments" not in function:
        return call
    written = {**function, "arguments": _write_arguments(function["arguments"], form.text_arguments)}
    return written if function is call else {**call, "function": written}


def _write_arguments(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
