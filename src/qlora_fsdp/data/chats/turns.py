"""What of a conversation is trained on: what the model has to say, to the token at which it stops.

**The trained tokens of a turn are those that the model generates at inference**: everything after the prompt that it is
given then (the conversation so far with the prompt for an answer, with the same tools), up to and with the token at
which generation stops. Stop tokens are the tokenizer's end token, all of `eos_token_id` in generation_config.json
(`stop_tokens`), and the one with which the template ends its answers.

- What the prompt has already, such as the header of the turn or `<think>`, is no target. Where the answer begins
  otherwise than the prompt does, as with thoughts where the prompt holds an empty one, it begins where the two part.
- Empty thoughts that a template writes behind the prompt are targets: the model has to generate them.
- What stands behind the stop token is no target, such as the line break that ChatML writes there.
- Some templates write the stop token as the beginning of what follows, as GLM does with `<|user|>`. It is a target.
- Behind the last answer, where nothing follows, the stop token is added that the template writes in the same place
  within a conversation; the end token, if it writes none.

A turn is found by replaying it (`replay`): the conversation up to it is rendered as for inference, and compared. That
takes renders of all that stands before, and long conversations have hundreds of turns. But what a template writes
around the words of a turn, its `Frame`, depends on its kind: the roles before and after it, whether it calls tools, has
thoughts, and so on. One render tells which message each part of the text is from (`Trace`), and a part that has the
frame of its kind holds the turn. A frame is learned

1. of a small conversation with a turn of this kind, which is replayed once in a process (`_find_by_example`), or
2. where none stands for the kind (two answers in a row, other roles), or the template writes something else around the
   turn, of the first and the last turn of this kind in the conversation itself, if there are many (`_find_alike`).

Turns that no frame fits are replayed themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.chats.calls import TOOLS, Message, write_calls
from qlora_fsdp.data.chats.examples import followed, make_example
from qlora_fsdp.data.chats.replay import Turn, end_of_words, replay
from qlora_fsdp.data.chats.stops import added_stop
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, find_words
from qlora_fsdp.data.message import called_name
from qlora_fsdp.data.row import NO_TARGET, BadRow
from qlora_fsdp.data.stop_tokens import stop_texts

MIN_ALIKE = 3  # turns of a kind, of which two are replayed


@dataclass(frozen=True)
class Frame:
    """What a template writes around the words of the turns of a kind.

    Attributes:
        head: between the beginning of the message's part of the text and the turn.
        tail: between the end of the turn and the end of the part.
        beyond: the end of the turn, where the template writes that after the part.
        stop: the stop token at the end of the turn.
    """

    head: str
    tail: str
    beyond: str
    stop: str

    @classmethod
    def around(cls, turn: Turn | None, text: str, part: Span) -> Frame | None:
        """What is around a turn in its message's part of the text; None: the turn is in pieces, or elsewhere."""
        if turn is None or len(turn.spans) > 1:
            return None
        start, end = turn.spans[0]
        first, last = part
        if not first <= start <= last:
            return None
        return cls(text[first:start], text[end:last], text[last:end], turn.stop)

    def find(self, text: str, part: Span, said: Sequence[str]) -> Turn | None:
        """The turn in a message's part of the text; None: something else is around it, or what it said not in it."""
        first, last = part
        start = first + len(self.head)
        end = last - len(self.tail) + len(self.beyond)
        if start >= end:
            return None
        has_head = text.startswith(self.head, first)
        has_tail = text.endswith(self.tail, start, last) and text.startswith(self.beyond, last)
        if not has_head or not has_tail or not text.endswith(self.stop, start, end):
            return None
        words_end = end - len(self.stop)
        if any(text.find(words, start, words_end) < 0 for words in said):
            return None
        return Turn([(start, end)], self.stop)


def find_turns(
    conversation: Conversation, text: str, trace: Trace | None, trained: list[bool]
) -> tuple[str, list[Span]]:
    """The text of a conversation, maybe with a stop token added behind the last answer, and what is trained on of it.

    Args:
        conversation: without generation marks in its template.
        text: of the whole conversation.
        trace: where the text comes from; None: that is not known.
        trained: for each message whether it is an answer to train on.

    Raises:
        BadRow: a turn can't be told from the rest.
    """
    numbers = [number for number, is_target in enumerate(trained) if is_target]
    turns: dict[int, Turn] = {}
    if trace is not None:
        turns |= _find_by_example(conversation, trace, numbers)
        turns |= _find_alike(conversation, trace, [number for number in numbers if number not in turns])
    spans: list[Span] = []
    for number in numbers:
        turn = turns.get(number) or replay(conversation, text, trace, number)
        if turn is None or any(start >= end for start, end in turn.spans):
            raise BadRow(
                NO_TARGET,
                f"the chat template has no {{% generation %}} marks, and renders message {number + 1} so that it"
                " can't be told from the rest; set data.chat_template to one with marks, or data.loss_on=all",
            )
        turns[number] = turn
        spans += turn.spans
    last_turn = turns.get(len(conversation.messages) - 1)
    if last_turn is None or last_turn.stop or text[spans[-1][1] :].strip():
        return text, spans
    start, end = spans[-1]
    added = _choose_added(conversation, text, (start, end))
    if added:
        text += added
        end = len(text)
    return text, [*spans[:-1], (start, end)]


def _choose_added(conversation: Conversation, text: str, turn: Span) -> str:
    """What is added behind the last turn, which no stop token ends; empty: the template ends it in a way of its own."""
    number = len(conversation.messages) - 1
    calls = bool(conversation.messages[number].get("tool_calls"))
    added = added_stop(conversation, calls)
    if added is not None:
        return added
    words_end = end_of_words(conversation, text, number, turn)
    is_closed = words_end is not None and bool(text[words_end : turn[1]].strip())
    return "" if is_closed and not calls else str(conversation.tokenizer.eos_token or "")


def _find_by_example(conversation: Conversation, trace: Trace, numbers: list[int]) -> dict[int, Turn]:
    """The turns that have the frame of a small conversation, by the number of the message."""
    messages = conversation.messages
    template = conversation.template
    tokenizer = conversation.tokenizer
    words = find_words(template)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    says_markup = words is not None and any(words.search(str(messages[number].get("content"))) for number in users)
    begins = 1 if messages[0]["role"] == "system" else 0
    has_other_roles = any(message["role"] not in ("user", "assistant", "tool") for message in messages[begins:])
    if says_markup or has_other_roles:
        return {}
    last_user = users[-1] if users else -1
    about = (bool(conversation.tools), template, tokenizer, conversation.variables_key, stop_texts(tokenizer))
    found: dict[int, Turn] = {}
    for number in numbers:
        pieces = trace.parts.get(number, [])
        example = make_example(messages, number, last_user, template)
        if len(pieces) != 1 or example is None:
            continue
        small, place = example
        frame = _learn(json.dumps(small), place, *about)
        if frame is None:
            continue
        turn = frame.find(trace.text, pieces[0], _must_say(messages[number], words))
        if turn is not None:
            found[number] = turn
    return found


@lru_cache(maxsize=4096)
def _learn(
    example: str,
    number: int,
    has_tools: bool,
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    variables: str,
    stops: tuple[str, ...],
) -> Frame | None:
    """The frame of turn `number` of a small conversation, `example`; None: it can't be found.

    It depends on `variables` and on `stops` too, which the tokenizer has.
    """
    messages = write_calls(json.loads(example), template, tokenizer)
    conversation = Conversation(messages, TOOLS if has_tools else None, template, tokenizer)
    try:
        trace = conversation.trace()
        pieces = trace.parts.get(number, [])
        turn = replay(conversation, trace.text, trace, number) if len(pieces) == 1 else None
    except DataError:
        raise
    except Exception:  # of any type; the turns of the conversation itself are replayed then
        return None
    return None if turn is None else Frame.around(turn, trace.text, pieces[0])


def _find_alike(conversation: Conversation, trace: Trace, numbers: list[int]) -> dict[int, Turn]:
    """The turns of each kind of which there are many, by the frame that is around the first and the last of them."""
    messages = conversation.messages
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number in numbers:
        if len(trace.parts.get(number, [])) == 1:
            kinds.setdefault(_kind(messages, number, last_user), []).append(number)
    found: dict[int, Turn] = {}
    for alike in kinds.values():
        if len(alike) >= MIN_ALIKE:
            found |= _find_between(conversation, trace, alike)
    return found


def _find_between(conversation: Conversation, trace: Trace, alike: list[int]) -> dict[int, Turn]:
    """The turns of one kind that have one frame. Those with another around them are missing.

    Where the first is written in a way of its own, as DeepSeek-R1's distills do with calls, the second stands for it.
    """
    words = find_words(conversation.template)
    found: dict[int, Turn] = {}

    def frame_of(number: int) -> Frame | None:
        turn = replay(conversation, trace.text, trace, number)
        if turn is not None:
            found[number] = turn
        return Frame.around(turn, trace.text, trace.parts[number][0])

    first = frame_of(alike[0])
    frame = frame_of(alike[-1])
    is_same = frame is not None and (frame == first or frame == frame_of(alike[1]))
    if frame is None or not is_same:
        return found
    for number in alike[1:-1]:
        turn = frame.find(trace.text, trace.parts[number][0], _must_say(conversation.messages[number], words))
        if turn is not None:
            found[number] = turn
    return found


def _must_say(message: Message, words: re.Pattern[str] | None) -> list[str]:
    """What a turn must have of what its message says: its words or, if a template may leave some out, the last line."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    if words is not None and words.search(said):
        said = said.rpartition("\n")[2]
    name = called_name(message)
    return [said] if name is None else [said, name]


def _kind(messages: list[Message], number: int, last_user: int) -> tuple[Any, ...]:
    """Everything but its words that a template looks at when it writes a message."""
    message = messages[number]
    before = messages[number - 1]["role"] if number else None
    after = messages[number + 1]["role"] if number + 1 < len(messages) else None
    content = message.get("content")
    is_empty = not content.strip() if isinstance(content, str) else type(content)
    return before, after, number > last_user, is_empty, frozenset(message), bool(message.get("tool_calls"))


@lru_cache(maxsize=64)
def can_trace(template: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether tracing small conversations gives the text, and the marks, that transformers gives."""
    is_proven = False
    for messages in (followed(False), followed(True)):
        for tools in (None, TOOLS):
            conversation = Conversation([*messages[0], *messages[1]], tools, template, tokenizer)
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
