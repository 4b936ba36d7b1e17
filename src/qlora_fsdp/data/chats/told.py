"""What the model learns otherwise than the data says, though a conversation is used: counted over all rows, and told.

Chat templates leave thoughts out, and words beside calls of tools, or write what nobody said. That is not wrong, as the
model is used with the same template; but whoever prepared the data does not see it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qlora_fsdp.common.text import plural
from qlora_fsdp.data.chats.stops import stops_of
from qlora_fsdp.data.chats.template import Conversation, Span
from qlora_fsdp.data.message import find_thoughts

# Flags of a row, beside those of data.cut.
THOUGHTS_LEFT_OUT = 8
WORDS_LEFT_OUT = 16
EMPTY_THOUGHTS = 32
NO_STOP = 64
OWN_CONVERSATIONS = 128

TOLD = {
    THOUGHTS_LEFT_OUT: "the chat template leaves out thoughts of answers, as most do where more follows, so that these"
    " answers teach the model to say nothing of what it thinks. data.thoughts=all trains on the thoughts of all answers"
    " that the template writes anywhere, data.thoughts=none on those of none",
    OWN_CONVERSATIONS: "data.thoughts=all makes several conversations of each, as the chat template leaves out the"
    " thoughts of earlier answers: each answer is trained on once, where its thoughts are written",
    WORDS_LEFT_OUT: "the chat template leaves out what answers say beside calls of tools, or writes it behind the token"
    " at which the model stops, and the calls alone are trained on",
    EMPTY_THOUGHTS: "the chat template writes empty thoughts before answers that have none, and the prompt for an"
    " answer has them not, so that the model learns to say them",
    NO_STOP: "the chat template writes no stop token behind answers that more follows, so that they do not teach the"
    " model to stop",
}
NUM_PLACES = 5  # of rows that are named
_EMPTY = re.compile(r"\s*<think>\s*</think>")


def find_told(conversation: Conversation, text: str, spans: Sequence[Span], trained: Sequence[bool]) -> int:
    """The flags of a conversation, in whose text `spans` are trained on, and of whose messages those in `trained`."""
    flags = THOUGHTS_LEFT_OUT if find_lost_thoughts(conversation, text, spans, trained) else 0
    said = _join(text, spans)
    thinks = False
    for message, is_target in zip(conversation.messages, trained, strict=True):
        if not is_target:
            continue
        thinks |= bool(find_thoughts(message))
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


def tell(flag: int, num_rows: int, places: Sequence[str]) -> str:
    """The line of log and preview about the rows that have a flag, the first of which are at `places`."""
    more = ", ..." if num_rows > len(places) else ""
    return f"{plural(num_rows, 'row')} used: {TOLD[flag]} ({', '.join(places)}{more})"


def find_lost_thoughts(
    conversation: Conversation, text: str, spans: Sequence[Span], trained: Sequence[bool]
) -> list[int]:
    """The numbers of the answers to train on whose thoughts are in nothing that is trained on."""
    said = _join(text, spans)
    found = []
    for number, (message, is_target) in enumerate(zip(conversation.messages, trained, strict=True)):
        thoughts = find_thoughts(message) if is_target else ""
        if thoughts and _last_line(thoughts) not in said:
            found.append(number)
    return found


def _join(text: str, spans: Sequence[Span]) -> str:
    return "\0".join(text[start:end] for start, end in spans)


def _last_line(said: str) -> str:
    return said.strip().rpartition("\n")[2].strip()
