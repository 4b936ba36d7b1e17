"""What the model learns otherwise than the data says, though a conversation is used: counted over all rows, and told.

Chat templates leave thoughts out, and words beside calls of tools, or write what nobody said. That is not wrong, as the
model is used with the same template; but whoever prepared the data does not see it.
"""

from __future__ import annotations

import re
from typing import Any

from qlora_fsdp.data.chats.template import Conversation, Span
from qlora_fsdp.data.chats.turns import stops_of

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message that templates have for its thoughts

# Flags of a row, beside those of data.cut.
THOUGHTS_LEFT_OUT = 4
WORDS_LEFT_OUT = 8
EMPTY_THOUGHTS = 16
NO_STOP = 32

TOLD = {
    THOUGHTS_LEFT_OUT: "the chat template leaves out thoughts of answers, as most do where more follows, so that these"
    " answers teach the model to say nothing of what it thinks. To train on all thoughts make each answer the last of a"
    " row of its own, or set data.chat_template to one that keeps thoughts",
    WORDS_LEFT_OUT: "the chat template leaves out what answers say beside calls of tools, and the calls alone are"
    " trained on",
    EMPTY_THOUGHTS: "the chat template writes empty thoughts before answers that have none, and the prompt for an"
    " answer has them not, so that the model learns to say them",
    NO_STOP: "the chat template writes no stop token behind answers that more follows, so that they do not teach the"
    " model to stop",
}
_EMPTY = re.compile(r"\s*<think>\s*</think>")


def find_told(conversation: Conversation, text: str, spans: list[Span], trained: list[bool]) -> int:
    """The flags of a conversation, in whose text `spans` are trained on, and of whose messages those in `trained`."""
    flags = 0
    said = "\0".join(text[start:end] for start, end in spans)
    thinks = False
    for message, is_target in zip(conversation.messages, trained, strict=True):
        if not is_target:
            continue
        thoughts = find_thoughts(message)
        thinks |= bool(thoughts)
        if thoughts and _last_line(thoughts) not in said:
            flags |= THOUGHTS_LEFT_OUT
        words = message.get("content")
        if message.get("tool_calls") and isinstance(words, str) and _last_line(words) not in said:
            flags |= WORDS_LEFT_OUT
    stops = stops_of(conversation)
    for start, end in spans:
        if not thinks and _EMPTY.match(text, start, end):
            flags |= EMPTY_THOUGHTS
        if not (stops and text[start:end].rstrip().endswith(stops)):
            flags |= NO_STOP
    return flags


def find_thoughts(message: dict[str, Any]) -> str:
    """The thoughts of an answer, which stand in a field of their own or before its words; empty if it has none."""
    field = next((message[key] for key in REASONING if message.get(key)), None)
    said = str(message.get("content")).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(field or said).strip()


def _last_line(said: str) -> str:
    return said.strip().rpartition("\n")[2].strip()
