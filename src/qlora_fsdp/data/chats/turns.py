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

A turn is found by replaying it (`_replay`): the conversation up to it is rendered as for inference, and compared. That
is one render of all that stands before, and long conversations have hundreds of turns. But what a template writes
around the words of a turn depends on its kind: the roles before and after it, whether it calls tools, has thoughts, and
so on. So a small conversation of each kind is replayed, once in a process (`_learn`). In real conversations one render
tells which message each part of the text is from (`Trace`), and a turn must have around its words what the small one
has around its own. Turns that have not, or that no small conversation stands for (two answers in a row, other roles),
are replayed themselves: the first and the last of a kind, if there are many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.data.chats.calls import TOOLS, USER, WORD, Message, write_calls
from qlora_fsdp.data.chats.examples import followed, make_example
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, find_words
from qlora_fsdp.data.message import called_name, function_of
from qlora_fsdp.data.row import NO_TARGET, REFUSED, BadRow
from qlora_fsdp.data.stop_tokens import stop_ids, stop_texts

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
    def around(cls, turn: Turn, text: str, part: Span) -> Frame | None:
        """What is around a turn in its message's part of the text; None: the turn is in pieces, or elsewhere."""
        start, end = turn.spans[0]
        if len(turn.spans) > 1 or not part[0] <= start <= part[1]:
            return None
        return cls(text[part[0] : start], text[end : part[1]], text[part[1] : end], turn.stop)

    def find(self, text: str, part: Span, said: Sequence[str]) -> Turn | None:
        """The turn in a message's part of the text; None: something else is around it, or what it said not in it."""
        start = part[0] + len(self.head)
        end = part[1] - len(self.tail) + len(self.beyond)
        is_framed = text.startswith(self.head, part[0]) and text.endswith(self.tail, start, part[1])
        if start >= end or not is_framed or not text.startswith(self.beyond, part[1]):
            return None
        words_end = end - len(self.stop)
        if not text.endswith(self.stop, start, end) or any(text.find(each, start, words_end) < 0 for each in said):
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
        turns = _find_by_kind(conversation, trace, numbers)
        turns |= _find_alike(conversation, trace, [number for number in numbers if number not in turns])
    for number in numbers:
        turn = turns.get(number) or _replay(conversation, text, trace, number)
        if turn is None or any(start >= end for start, end in turn.spans):
            raise BadRow(
                NO_TARGET,
                f"the chat template has no {{% generation %}} marks, and renders message {number + 1} so that it"
                " can't be told from the rest; set data.chat_template to one with marks, or data.loss_on=all",
            )
        turns[number] = turn
    spans = [span for number in numbers for span in turns[number].spans]
    number = len(conversation.messages) - 1
    if number not in turns or turns[number].stop or text[spans[-1][1] :].strip():
        return text, spans
    added = _find_added(conversation, text, spans[-1])
    start, end = spans[-1]
    return text + added, [*spans[:-1], (start, len(text + added) if added else end)]


def stops_of(conversation: Conversation) -> tuple[str, ...]:
    """The stop tokens of answers as text: those of the model, and the one with which the template ends answers."""
    tokenizer = conversation.tokenizer
    return _template_stops(conversation.template, tokenizer, stop_texts(tokenizer), conversation.variables_key)


def ends_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """With what texts end that need no end token: the stop tokens, and what the chat template ends answers with."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return stop_texts(tokenizer)
    return stops_of(Conversation([], None, template, tokenizer))


def end_ids_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids at which generation stops: the stop tokens, and what the chat template ends answers with.

    The latter is left out where it is no added token; see `end_texts_of`.
    """
    known = tokenizer.added_tokens_encoder
    written = [known[text] for text in ends_of(tokenizer) if text in known]
    return tuple(dict.fromkeys([*stop_ids(tokenizer), *written]))


def end_texts_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What the chat template ends answers with, where that is several tokens: generation stops there as a text.

    A single token of ordinary text, such as a bracket, stops nothing: answers have it too.
    """
    known = tokenizer.added_tokens_encoder
    stops = stop_texts(tokenizer)
    texts = [text for text in ends_of(tokenizer) if text not in stops and text not in known]
    return tuple(text for text in texts if len(tokenizer.encode(text, add_special_tokens=False)) > 1)


@lru_cache(maxsize=64)
def _template_stops(
    template: str, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], variables: str
) -> tuple[str, ...]:
    """The stop tokens, with what ends an answer that another message follows, if it is none of them: maybe no token."""
    messages, more = followed(calls=False)
    conversation = Conversation([*messages, *more], None, template, tokenizer)
    try:
        text = conversation.render(conversation.messages)
        after = conversation.render(messages)
        parts = conversation.trace().parts
    except DataError:
        raise
    except Exception:  # of any type; another conversation may be written
        return stops
    words = str(messages[-1]["content"])
    if after.rpartition(words)[2].lstrip().startswith(stops):
        # It ends answers as the model does, though earlier ones may end otherwise: those of gpt-oss end with the token
        # that ends thoughts too.
        return stops
    behind = text.partition(words)[2]
    pieces = parts.get(len(messages) - 1, [])
    own = text[slice(*pieces[0])].rpartition(words)[2].strip() if len(pieces) == 1 else ""
    if not own:  # the next message begins with it
        own = behind[: num_common(behind, after.rpartition(words)[2])].strip()
    if not own or any(stop in own for stop in stops) or _is_before_calls(own, template, tokenizer):
        return stops
    return (*stops, own)


def _is_before_calls(marker: str, template: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a template writes a marker within turns too, before a call, as that of GigaChat 3: it ends no turn."""
    messages, more = followed(calls=True)
    conversation = Conversation(write_calls([*messages, *more], template, tokenizer), TOOLS, template, tokenizer)
    try:
        trace = conversation.trace()
    except DataError:
        raise
    except Exception:  # of any type; it knows no calls
        return False
    number = len(messages) - 1
    for part in trace.parts.get(number, []):
        start = _find_start(conversation, trace.text, number, part)
        before, call, _ = trace.text[start : part[1]].partition(WORD)
        if call and marker in before:
            return True
    return False


def _replay(conversation: Conversation, text: str, trace: Trace | None, number: int) -> Turn | None:
    """Finds the turn `messages[number]` by the prompt that inference gives; None: it can't be told from the rest."""
    stops = stops_of(conversation)
    pieces = [] if trace is None else trace.parts.get(number, [])
    pieces = pieces or _find_by_words(conversation, text, number)
    if not pieces:
        return None
    spans, stop = [], ""
    for place, (start, end) in enumerate(pieces):
        if place == 0:
            start = _find_start(conversation, text, number, (start, end))
        words_end = _end_of_words(conversation, text, number, (start, end))
        if words_end is None:
            return None
        message = conversation.messages[number]
        early_end = _find_early_stop(text, (start, words_end), stops, message)
        if early_end is not None and not _says_behind(message, text[start:early_end], text[early_end:words_end]):
            before, behind = text[start:early_end], text[early_end:words_end]
            if any(leaf in behind and leaf not in before for leaf in _called_in(message)):
                reason = f"it writes a token at which the model stops before a call of message {number + 1}"
                raise BadRow(REFUSED, f"{reason}; set data.chat_template to one that writes it behind all calls")
            spans.append((start, early_end))
            return Turn(spans, next(each for each in stops if text.endswith(each, start, early_end)))
        stop, stop_end = _find_stop(text, words_end, end, stops)
        if not stop:
            stop_end = words_end + len(text[words_end:end].rstrip())
            if stop_end == words_end:  # the end marker stands where the next message begins, if anywhere
                stop_end = _end_before_next(conversation, text, number, words_end)
        spans.append((start, stop_end))
    return None if _holds_answer(conversation, text, trace, number, spans) else Turn(spans, stop)


def _holds_answer(conversation: Conversation, text: str, trace: Trace | None, number: int, spans: list[Span]) -> bool:
    """Whether the answer of a tool lies in the turn that calls it, and the render does not tell where."""
    answer = next((message for message in conversation.messages[number + 1 : number + 2]), {})
    if answer.get("role") != "tool" or (trace is not None and trace.parts.get(number + 1)):
        return False
    changed = conversation.replace(number + 1, {**answer, "content": _PROBE})
    first, last = _difference(text, conversation.render(changed))
    return any(start < last and first < end for start, end in spans)


def _find_start(conversation: Conversation, text: str, number: int, part: Span) -> int:
    """Where the model begins to generate a turn, whose message gave a part of the text that begins with its header."""
    messages = conversation.messages[:number] or [USER]
    prompt = before = ""
    with suppress(BadRow):  # a template may refuse a conversation that ends here
        prompt = conversation.render(messages, prompt=True)
        shared = _whole_markers(prompt, num_common(prompt, text[: part[1]]))
        is_whole_prompt = shared == len(prompt)  # which may end where the message's own words begin
        if number and (shared > part[0] or (shared == part[0] and is_whole_prompt)):
            return shared
        before = conversation.render(messages)
    # What stands before is written otherwise once more follows.
    written = text[slice(*part)]
    header = prompt.removeprefix(before) if prompt.startswith(before) else ""
    shared = _whole_markers(header, num_common(header, written))
    if shared:
        return part[0] + shared
    for length in range(min(len(prompt), len(written), MAX_HEADER), 0, -1):
        if written[:length].strip() and prompt.endswith(written[:length]):
            return part[0] + length
    return part[0]


def _whole_markers(prompt: str, length: int) -> int:
    """The length of a beginning of a prompt that ends in none of its markers, such as `<think>`: they are one token."""
    around = prompt[max(0, length - MAX_HEADER) : length + MAX_HEADER]
    place = min(length, MAX_HEADER)
    cut = (marker.start() for marker in _MARKER.finditer(around) if marker.start() < place < marker.end())
    return length - place + next(cut, place)


def _end_of_words(conversation: Conversation, text: str, number: int, part: Span) -> int | None:
    """Where the last of all that a message says ends in a part of the text; None: nothing of it is there."""
    message = conversation.messages[number]
    start, end = part
    written = text[start:end]
    for stop in stops_of(conversation):  # within which short words may be
        written = written.replace(stop, "\0" * len(stop))
    said = [each for each in _said_in(message) if each]
    places = [written.rfind(each) + len(each) for each in said if each in written]
    if places or not said:
        return start + max(places, default=0)
    # The template writes the words in its own way, or none.
    with suppress(BadRow):
        changed = {**message, "content": _PROBE}
        first, last = _difference(text, conversation.render(conversation.replace(number, changed)))
        if start <= first < last <= end:
            return last
    return None


def _said_in(message: Message) -> list[str]:
    """The last lines of all that a message says, and the names and values of its calls, as templates may write them."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    said = [part.get("text") for part in parts if isinstance(part, dict)]
    said += _called_in(message)
    if not any(isinstance(each, str) and each.strip() for each in said):
        said = [value for key, value in message.items() if key != "role"]  # such as thoughts
    lines = [each.strip().rpartition("\n")[2].strip() for each in said if isinstance(each, str)]
    return [*lines, *(json.dumps(line, ensure_ascii=False)[1:-1] for line in lines if "\\" in line or '"' in line)]


def _called_in(message: Message) -> list[str]:
    """The names and values of the calls of a message, and arguments that are text."""
    calls = message.get("tool_calls")
    found: list[str] = []
    for call in calls if isinstance(calls, list) else []:
        function = function_of(call) or {}
        name = function.get("name")
        arguments = function.get("arguments")
        if isinstance(name, str):
            found.append(name)
        if isinstance(arguments, str):
            found.append(arguments)
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found += _leaves(arguments)
    return found


def _leaves(value: Any) -> list[str]:
    """All texts, numbers and names in a JSON value, as text."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in (str(key), *_leaves(each))]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value if isinstance(value, str) else json.dumps(value)]


def _find_early_stop(text: str, turn: Span, stops: tuple[str, ...], message: Message) -> int | None:
    """The end of a stop token that a template writes among what a message says, at which generation is over.

    The template of DeepSeek-R1's distills writes what a message says beside its calls there, with another header. None:
    there is none, or the message says it itself.
    """
    said = json.dumps(message, ensure_ascii=False, default=str)
    places = [text.find(stop, *turn) + len(stop) for stop in stops if stop not in said and stop in text[slice(*turn)]]
    return min(places, default=None)


def _says_behind(message: Message, before: str, behind: str) -> bool:
    """Whether a message without calls says its words behind what looks like a stop, such as an end of thoughts."""
    if message.get("tool_calls"):
        return False
    return any(words and words in behind and words not in before for words in _said_in(message))


def _find_stop(text: str, words_end: int, end: int, stops: tuple[str, ...]) -> tuple[str, int]:
    """The first stop token behind the words of a message, and where it ends; empty: there is none up to the next one's.

    It may be the last of what the message says itself, and it may stand right behind the message's part of the text.
    """
    following = text[end : end + MAX_HEADER]
    begins = end + len(following) - len(following.lstrip())
    found = [(text.find(stop, max(0, words_end - len(stop)), begins + len(stop)), stop) for stop in stops]
    place, stop = min(((place, stop) for place, stop in found if place >= 0), default=(0, ""))
    return stop, place + len(stop)


def _end_before_next(conversation: Conversation, text: str, number: int, words_end: int) -> int:
    """The end of a turn whose end marker the template writes before the next message, or as the last of all."""
    with suppress(BadRow):
        after = conversation.render(conversation.messages[: number + 1])
        if text.startswith(after) and len(after.rstrip()) > words_end:
            return len(after.rstrip())
    return words_end


def _find_by_words(conversation: Conversation, text: str, number: int) -> list[Span]:
    """The part of the text that a message gave, by what changes with its content, where the render can't be traced.

    It begins with the header of the turn and ends with what the template writes behind its words in any place.
    """
    messages, message = conversation.messages, conversation.messages[number]
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return []
    probe = {**message, "content": _PROBE}
    try:
        start, end = _difference(text, conversation.render(conversation.replace(number, probe)))
        after = conversation.render(messages[: number + 1])
        _, last_end = _difference(after, conversation.render([*messages[:number], probe]))
        small = [USER] if not number else messages[:number]
        header = conversation.render(small, prompt=True).removeprefix(conversation.render(small))
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


def _find_added(conversation: Conversation, text: str, turn: Span) -> str:
    """What is added behind the last turn, which no stop token ends: what the template writes where more follows.

    Empty: it ends a last answer in a way of its own.
    """
    tokenizer, stops, number = conversation.tokenizer, stops_of(conversation), len(conversation.messages) - 1
    calls = bool(conversation.messages[number].get("tool_calls"))
    written = _written_behind(conversation.template, tokenizer, stops, calls, conversation.variables_key)
    if written is not None:
        return written
    words_end = _end_of_words(conversation, text, number, turn)
    is_closed = words_end is not None and bool(text[words_end : turn[1]].strip())
    return "" if is_closed and not calls else str(tokenizer.eos_token or "")


@lru_cache(maxsize=64)
def _written_behind(
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[str, ...],
    calls: bool,
    variables: str,
) -> str | None:
    """What a template writes behind a last turn once more follows, up to the stop token; None: it writes none."""
    messages, more = followed(calls)
    tools = TOOLS if calls else None
    conversation = Conversation(write_calls([*messages, *more], template, tokenizer), tools, template, tokenizer)
    try:
        text = conversation.render(conversation.messages)
        after = conversation.render(conversation.messages[: len(messages)])
    except BadRow:
        return None
    if not text.startswith(after):
        return None
    stop, end = _find_stop(text, len(after) + 1, len(after), stops)
    return text[len(after) : end] if stop and end > len(after) else None


def _find_by_kind(conversation: Conversation, trace: Trace, numbers: list[int]) -> dict[int, Turn]:
    """The turns of a traced conversation that are of a known kind and look like it, by the number of the message."""
    messages, template, tokenizer = conversation.messages, conversation.template, conversation.tokenizer
    words = find_words(template)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    says_markup = words is not None and any(words.search(str(messages[number].get("content"))) for number in users)
    roles = {message["role"] for message in messages[1 if messages[0]["role"] == "system" else 0 :]}
    if says_markup or not roles <= {"user", "assistant", "tool"}:
        return {}
    variables = conversation.variables_key
    found = {}
    for number in numbers:
        pieces = trace.parts.get(number, [])
        example = make_example(messages, number, users[-1] if users else -1, template)
        if len(pieces) != 1 or example is None:
            continue
        small, place = json.dumps(example[0]), example[1]
        stops, has_tools = stop_texts(tokenizer), bool(conversation.tools)
        frame = _learn(small, place, has_tools, template, tokenizer, variables, stops)
        turn = None if frame is None else frame.find(trace.text, pieces[0], _must_say(messages[number], words))
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
    """What is around turn `number` of a small conversation, `example`; None if that can't be found."""
    messages = write_calls(json.loads(example), template, tokenizer)
    conversation = Conversation(messages, TOOLS if has_tools else None, template, tokenizer)
    try:
        trace = conversation.trace()
        pieces = trace.parts.get(number, [])
        turn = _replay(conversation, trace.text, trace, number) if len(pieces) == 1 else None
    except DataError:
        raise
    except Exception:  # of any type; the turns of the conversation itself are replayed then
        return None
    return None if turn is None else Frame.around(turn, trace.text, pieces[0])


def _find_alike(conversation: Conversation, trace: Trace, numbers: list[int]) -> dict[int, Turn]:
    """Finds the turns of each kind of which there are three or more by replaying the first and the last of them.

    If the same is around both, it is around those between them, or they are missing from the result. Where the first is
    written in a way of its own, as DeepSeek-R1's distills do with calls, the second stands for it.
    """
    messages, text = conversation.messages, trace.text
    words = find_words(conversation.template)
    last_user = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number in numbers:
        if len(trace.parts.get(number, [])) == 1:
            kinds.setdefault(_kind(messages, number, last_user), []).append(number)
    found: dict[int, Turn] = {}
    for alike in kinds.values():
        if len(alike) < 3:
            continue
        frames: dict[int, Frame | None] = {}
        for number in (alike[0], alike[-1], alike[1]):
            if number == alike[1] and frames.get(alike[0]) == frames.get(alike[-1]):
                break
            turn = _replay(conversation, text, trace, number)
            if turn is not None:
                found[number] = turn
                frames[number] = Frame.around(turn, text, trace.parts[number][0])
        frame = frames.get(alike[-1])
        is_same = frame is not None and frame in (frames.get(alike[0]), frames.get(alike[1]))
        if frame is None or not is_same:
            continue
        for number in alike[1:-1]:
            turn = frame.find(text, trace.parts[number][0], _must_say(messages[number], words))
            if turn is not None:
                found[number] = turn
    return found


def _must_say(message: Message, words: Any) -> list[str]:
    """What a turn must have of what its message says: its words or, if a template may leave some out, the last line."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    name = called_name(message)
    if words is not None and words.search(said):
        said = said.rpartition("\n")[2]
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
