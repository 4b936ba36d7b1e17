"""Where one turn of the assistant is in the text of a conversation, by rendering the conversation up to it and on.

That takes two renders or more. Most turns are found with less (`turns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.data.chats.template import Conversation, Span, Trace
from qlora_fsdp.data.message import called_name

_PROBE = "\ue000"  # of Unicode's private use area, which no text should have


def find_turn(conversation: Conversation, text: str, number: int) -> Span | None:
    """Finds the assistant's turn `messages[number]`, with its end marker, in the whole conversation `text`.

    It lies between the conversation rendered up to it, with the prompt for it, and the conversation rendered up to
    its end. Some templates render a turn otherwise once others follow (Qwen3 drops its thoughts, Mistral moves
    the system message, Phi-3 ends with a token of its own). There the turn is what changes with its content, and
    the end marker that follows the content in both. A turn that calls tools and says nothing begins where content would
    stand.
    """
    messages, message = conversation.messages, conversation.messages[number]
    before = conversation.render(messages[:number], prompt=True) if number else None
    after = conversation.render(messages[: number + 1])
    start = len(before) if before is not None and text.startswith(before) and after.startswith(before) else None
    end = len(after) if text.startswith(after) else None
    if start is not None and end is not None:
        return start, end

    content = message.get("content") or ""
    if not isinstance(content, str):
        return None
    probe = {**message, "content": _PROBE}
    content_start, content_end = _difference(text, conversation.render(conversation.replace(number, probe)))
    last_content_start, last_content_end = _difference(after, conversation.render([*messages[:number], probe]))
    if not content.strip():  # what stands before and after its place may be alike
        content_end, last_content_end = max(content_start, content_end), max(last_content_start, last_content_end)
    marker = after[last_content_end:]
    marker_length = _common_tokens(marker, text[content_end : content_end + len(marker)], conversation.tokenizer)
    if marker and not marker_length and before is not None:  # gpt-oss ends the last answer in a way of its own
        earlier = _marker_before_more(conversation, number, probe, before)
        marker_length = len(earlier) if text.startswith(earlier, content_end) else 0
    start = content_start if start is None else start
    end = content_end + marker_length if end is None else end
    name = called_name(message)
    is_silent_call = not content.strip() and name is not None and name in text[start:end]
    if (content_start >= content_end and not is_silent_call) or (marker and not marker_length):
        return None
    return None if _holds_answer(conversation, text, number, (start, end)) else (start, end)


def find_call(conversation: Conversation, trace: Trace | None, number: int) -> Span | None:
    """Finds a call of tools without words where other messages move, as Mistral's templates move tools.

    It is the message's part of the text without the prompt for it.
    """
    part = None if trace is None else trace.parts.get(number)
    message = conversation.messages[number]
    name = called_name(message)
    if trace is None or part is None or name is None or message.get("content") or number == 0:
        return None
    before = conversation.messages[:number]
    header = conversation.render(before, prompt=True)[len(conversation.render(before)) :]
    span = part[0] + len(header), part[1]
    is_call = trace.text.startswith(header, part[0]) and name in trace.text[slice(*span)]
    return span if is_call and not _holds_answer(conversation, trace.text, number, span) else None


def _holds_answer(conversation: Conversation, text: str, number: int, span: Span) -> bool:
    """Whether the answer of a tool lies in the turn that calls it, as Gemma 4's templates write it before words."""
    answer = next((message for message in conversation.messages[number + 1 : number + 2]), {})
    if answer.get("role") != "tool":
        return False
    probe = conversation.replace(number + 1, {**answer, "content": _PROBE})
    start, end = _difference(text, conversation.render(probe))
    return start < span[1] and end > span[0]


def _marker_before_more(conversation: Conversation, number: int, probe: dict[str, Any], before: str) -> str:
    """The end marker of turn `number` where another turn is to follow it.

    Args:
        conversation: of which the turn is a part.
        number: of the turn.
        probe: the turn with another content.
        before: the conversation up to the turn, with the prompt for it, which ends as the prompt for the next does.
    """
    earlier = conversation.messages[:number]
    text = conversation.render([*earlier, conversation.messages[number]], prompt=True)
    _, content_end = _difference(text, conversation.render([*earlier, probe], prompt=True))
    return text[content_end:].removesuffix(before[len(conversation.render(earlier)) :])


def _difference(text: str, other: str) -> Span:
    """The part of `text` that is not the same in `other`: all between their common start and their common end."""
    return num_common(text, other), len(text) - num_common(text[::-1], other[::-1])


def _common_tokens(text: str, other: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length, in characters, of the tokens with which both begin."""
    encoded, other_encoded = (
        tokenizer(t, add_special_tokens=False, return_offsets_mapping=True) for t in (text, other)
    )
    num_tokens = num_common(encoded["input_ids"], other_encoded["input_ids"])
    return int(encoded["offset_mapping"][num_tokens - 1][1]) if num_tokens else 0


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two texts or lists have in common at their beginnings; by halves, as these are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
