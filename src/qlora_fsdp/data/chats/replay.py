"""Find a turn by replaying it: the conversation up to it is rendered as for inference, and compared with the whole.

Where a turn begins, the prompt that inference gives tells: `_find_start`. Where its words end is looked for by what the
message says: `end_of_words`. It ends with the first stop token behind these.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.text import num_common
from qlora_fsdp.data.chats.calls import USER, Message
from qlora_fsdp.data.chats.stops import find_stop, stops_of
from qlora_fsdp.data.chats.template import Conversation, Span, Trace
from qlora_fsdp.data.message import called_values, last_lines_of
from qlora_fsdp.data.row import REFUSED, BadRow

MAX_HEADER = 100  # characters of a turn, that the end of a prompt is looked for in
_MARKER = re.compile(r"<[^<>\s]+>")
_PROBE = "\ue000"  # of Unicode's private use area, which no text should have


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant in the text of a conversation.

    Attributes:
        spans: what is trained on: one span, or several where the answers of tools stand within the turn.
        stop: the stop token that it ends with; empty if none stands there.
    """

    spans: list[Span]
    stop: str = ""


def replay(conversation: Conversation, text: str, trace: Trace | None, number: int) -> Turn | None:
    """Finds the turn `messages[number]` by the prompt that inference gives; None: it can't be told from the rest.

    Args:
        conversation: all of it.
        text: that the template makes of it.
        trace: where the text comes from; None: that is not known.
        number: of the message.

    Raises:
        BadRow: the template writes a stop token before a call of the message.
    """
    pieces = [] if trace is None else trace.parts.get(number, [])
    if not pieces:
        pieces = _find_by_words(conversation, text, number)
    spans: list[Span] = []
    stop = ""
    for start, end in pieces:
        if not spans:
            start = _find_start(conversation, text, number, (start, end))
        words_end = end_of_words(conversation, text, number, (start, end))
        if words_end is None:
            return None
        early_stop, early_end = _find_early_stop(conversation, text, number, (start, words_end))
        if early_stop:
            return Turn([*spans, (start, early_end)], early_stop)
        stop, stop_end = find_stop(text, words_end, end, stops_of(conversation))
        if not stop:
            stop_end = words_end + len(text[words_end:end].rstrip())
            if stop_end == words_end:  # the end marker stands where the next message begins, if anywhere
                stop_end = _end_before_next(conversation, text, number, words_end)
        spans.append((start, stop_end))
    if not spans or _holds_answer(conversation, text, trace, number, spans):
        return None
    return Turn(spans, stop)


def end_of_words(conversation: Conversation, text: str, number: int, part: Span) -> int | None:
    """Where the last of all that a message says ends in a part of the text; None: nothing of it is there."""
    start, end = part
    message = conversation.messages[number]
    written = text[start:end]
    for stop in stops_of(conversation):  # within which short words may be
        written = written.replace(stop, "\0" * len(stop))
    said = last_lines_of(message)
    if not said:
        return start
    places = [written.rfind(line) + len(line) for line in said if line in written]
    if places:
        return start + max(places)
    # The template writes the words in its own way, or none.
    with suppress(BadRow):
        changed = {**message, "content": _PROBE}
        first, last = _difference(text, conversation.render(conversation.replace(number, changed)))
        if start <= first < last <= end:
            return last
    return None


def _find_start(conversation: Conversation, text: str, number: int, part: Span) -> int:
    """Where the model begins to generate a turn, whose message gave a part of the text that begins with its header."""
    start, end = part
    messages = conversation.messages[:number] or [USER]
    prompt = before = ""
    with suppress(BadRow):  # a template may refuse a conversation that ends here
        prompt = conversation.render(messages, prompt=True)
        shared = _whole_markers(prompt, num_common(prompt, text[:end]))
        is_whole_prompt = shared == len(prompt)  # which may end where the message's own words begin
        if number and (shared > start or (shared == start and is_whole_prompt)):
            return shared
        before = conversation.render(messages)
    # What stands before is written otherwise once more follows.
    written = text[start:end]
    header = prompt.removeprefix(before) if prompt.startswith(before) else ""
    shared = _whole_markers(header, num_common(header, written))
    if shared:
        return start + shared
    for length in range(min(len(prompt), len(written), MAX_HEADER), 0, -1):
        beginning = written[:length]
        if beginning.strip() and prompt.endswith(beginning):
            return start + length
    return start


def _whole_markers(prompt: str, length: int) -> int:
    """The length of a beginning of a prompt that ends in none of its markers, such as `<think>`: they are one token."""
    first = max(0, length - MAX_HEADER)
    for marker in _MARKER.finditer(prompt, first, length + MAX_HEADER):
        if marker.start() < length < marker.end():
            return marker.start()
    return length


def _find_early_stop(conversation: Conversation, text: str, number: int, words: Span) -> tuple[str, int]:
    """The stop token among what a message says, at which generation is over, and where it ends; empty: there is none.

    The template of DeepSeek-R1's distills writes what a message says beside its calls there, with another header. A
    stop token that the message says itself is none of these.

    Raises:
        BadRow: a call stands behind it.
    """
    start, end = words
    message = conversation.messages[number]
    own = json.dumps(message, ensure_ascii=False, default=str)
    found: list[tuple[int, str]] = []
    for stop in stops_of(conversation):
        place = text.find(stop, start, end)
        if place >= 0 and stop not in own:
            found.append((place + len(stop), stop))
    if not found:
        return "", 0
    stop_end, stop = min(found)
    before = text[start:stop_end]
    behind = text[stop_end:end]
    if message.get("tool_calls"):
        if any(value in behind and value not in before for value in called_values(message)):
            reason = f"it writes a token at which the model stops before a call of message {number + 1}"
            raise BadRow(REFUSED, f"{reason}; set data.chat_template to one that writes it behind all calls")
    elif any(line in behind and line not in before for line in last_lines_of(message)):
        return "", 0  # it only looks like a stop, such as an end of thoughts
    return stop, stop_end


def _end_before_next(conversation: Conversation, text: str, number: int, words_end: int) -> int:
    """The end of a turn whose end marker the template writes before the next message, or as the last of all."""
    with suppress(BadRow):
        after = conversation.render(conversation.messages[: number + 1]).rstrip()
        if text.startswith(after) and len(after) > words_end:
            return len(after)
    return words_end


def _holds_answer(conversation: Conversation, text: str, trace: Trace | None, number: int, spans: list[Span]) -> bool:
    """Whether the answer of a tool lies in the turn that calls it, and the render does not tell where."""
    if number + 1 == len(conversation.messages):
        return False
    answer = conversation.messages[number + 1]
    is_told = trace is not None and bool(trace.parts.get(number + 1))
    if answer["role"] != "tool" or is_told:
        return False
    changed = conversation.replace(number + 1, {**answer, "content": _PROBE})
    first, last = _difference(text, conversation.render(changed))
    return any(start < last and first < end for start, end in spans)


def _find_by_words(conversation: Conversation, text: str, number: int) -> list[Span]:
    """The part of the text that a message gave, by what changes with its content, where the render can't be traced.

    It begins with the header of the turn and ends with what the template writes behind its words in any place.
    """
    messages = conversation.messages
    message = messages[number]
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return []
    probe: Message = {**message, "content": _PROBE}
    asked = messages[:number] or [USER]
    try:
        start, end = _difference(text, conversation.render(conversation.replace(number, probe)))
        after = conversation.render(messages[: number + 1])
        _, last_end = _difference(after, conversation.render([*messages[:number], probe]))
        header = conversation.render(asked, prompt=True).removeprefix(conversation.render(asked))
    except BadRow:
        return []
    if start >= end:
        return []
    marker = after[last_end:]
    length = _common_tokens(marker, text[end : end + len(marker)], conversation.tokenizer)
    if marker and not length:
        return []
    begins = text.rfind(header, 0, start + num_common(header, text[start:])) if header else -1
    return [(start if begins < 0 else begins, end + length)]


def _difference(text: str, other: str) -> Span:
    """The part of `text` that is not the same in `other`: all between their common start and their common end."""
    return num_common(text, other), len(text) - num_common(text[::-1], other[::-1])


def _common_tokens(text: str, other: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length, in characters, of the tokens with which both begin."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    others = tokenizer(other, add_special_tokens=False)
    num_tokens = num_common(encoded["input_ids"], others["input_ids"])
    return int(encoded["offset_mapping"][num_tokens - 1][1]) if num_tokens else 0
