"""Conversations: the text that the chat template makes of them, and where the assistant's turns are in it.

A template may mark the assistant's turns ({% generation %}). Otherwise a turn is found by rendering the conversation
up to it and up to its end. That is one render of the whole or half of it per turn, and long conversations have hundreds
of turns. So it is done for a few turns of each kind alone. The others are found in the text of one render, which notes
the part that each message gave (see `template_trace`), if the turns that were rendered agree on how a part begins and
ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.row import EMPTY, NO_TARGET, REFUSED, TRAIN_KEYS, BadRow, is_trained
from qlora_fsdp.data.template_trace import trace_messages

Span = tuple[int, int]  # characters: start, end

# Characters of Unicode's private use area, which no text should have.
_PROBE = "\ue000"
_TAG = re.compile("\ue001([0-9]+)\ue002")


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
        raise DataError(
            "The rows are messages, but the tokenizer has no chat template. Set data.chat_template=chatml (or llama3,"
            " alpaca, or a Jinja file)."
        ) from error
    # Parquet fills missing fields with null; templates test whether a field is there.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    trained = [message["role"] == "assistant" and is_trained(message) for message in messages]
    if loss_on is LossOn.completion:
        _check_answers(messages, trained)
    messages = [{key: value for key, value in message.items() if key not in TRAIN_KEYS} for message in messages]
    conversation = Conversation(messages, tools, template, tokenizer)

    has_marks = loss_on is LossOn.completion and has_generation_marks(template)
    text, marks = conversation.render_marks() if has_marks else (conversation.render(messages), [])
    conversation.check_calls(text)
    if loss_on is LossOn.all:
        return text, ((0, len(text)),)
    return text, tuple(_choose_marks(marks, messages, trained) if has_marks else conversation.find_turns(text, trained))


def has_generation_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's turns with {% generation %}."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _check_answers(messages: list[dict[str, Any]], trained: list[bool]) -> None:
    """Refuses a conversation that has nothing to train on, or an empty answer to train on."""
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(NO_TARGET, "no message of the assistant")
    if not any(trained):
        raise BadRow(NO_TARGET, "no message of the assistant is to be trained on")
    for number, (message, is_target) in enumerate(zip(messages, trained, strict=True), start=1):
        said = [value for key, value in message.items() if key not in ("role", *TRAIN_KEYS)]
        if is_target and not any(value.strip() if isinstance(value, str) else value for value in said):
            raise BadRow(EMPTY, f"message {number}, an answer to train on, is empty")


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


@dataclass(frozen=True)
class Conversation:
    """A conversation and the template that writes it. End markers are compared by the tokenizer's tokens."""

    messages: list[dict[str, Any]]
    tools: Any
    template: str
    tokenizer: PreTrainedTokenizerBase

    def render(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        """The text of messages of this conversation, with `prompt` followed by the prompt for an assistant's turn.

        Raises:
            BadRow: the template refuses them.
        """
        return self._render(messages, prompt=prompt)[0]

    def render_marks(self) -> tuple[str, list[Span]]:
        """The text of the whole conversation, and what the template marks in it.

        Raises:
            BadRow: the template refuses it.
        """
        return self._render(self.messages, marks=True)

    def _render(
        self, messages: list[dict[str, Any]], *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(  # annotated as str, but a pair: texts, and spans of marks
                conversations=[messages],
                tools=self.tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **special_tokens,
            )
        except Exception as error:  # templates compute, and their sandbox lets any error through
            raise BadRow(REFUSED, str(error) or repr(error)) from error
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def _with(self, number: int, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The conversation with another message in the place of one."""
        return [*self.messages[:number], message, *self.messages[number + 1 :]]

    def check_calls(self, text: str) -> None:
        """Refuses a template that leaves calls of tools out: the model would learn to say nothing where it should call.

        Args:
            text: the whole conversation.

        Raises:
            BadRow: a message's calls are left out.
        """
        calling = [number for number, message in enumerate(self.messages) if message.get("tool_calls")]
        written = self._written_calls(text, calling) if len(calling) > 1 else set()
        for number in calling:
            if number in written:
                continue
            without = {key: value for key, value in self.messages[number].items() if key != "tool_calls"}
            try:
                is_left_out = text == self.render(self._with(number, {"content": "", **without}))
            except BadRow:  # a template that can't do without them writes them
                is_left_out = False
            if is_left_out:
                detail = (
                    f"it leaves out the tool_calls of message {number + 1}; set data.chat_template to one that has them"
                )
                raise BadRow(REFUSED, detail)

    def _written_calls(self, text: str, calling: list[int]) -> set[int]:
        """The messages whose calls are surely in the text: it has the tags behind the names of their functions.

        The text with tags must be this text but for the tags. Whatever is not found here is checked message by message.
        """
        messages = list(self.messages)
        for number in calling:
            messages[number] = _tag_call(messages[number], number)
        try:
            tagged = self.render(messages)
        except BadRow:  # a template that knows the tools' names
            return set()
        return {int(number) for number in _TAG.findall(tagged)} if _TAG.sub("", tagged) == text else set()

    def find_turns(self, text: str, trained: list[bool]) -> list[Span]:
        """The assistant's turns to train on, each with its end marker, in the whole conversation.

        Args:
            text: the whole conversation.
            trained: for each message whether it is an answer to train on.

        Raises:
            BadRow: a turn can't be told from the rest.
        """
        turns = [number for number, is_target in enumerate(trained) if is_target]
        spans = self._find_alike(text, turns)
        for number in turns:
            span = spans.get(number) or self._find_turn(text, number)
            if span is None:
                raise BadRow(
                    NO_TARGET,
                    f"the chat template has no {{% generation %}} marks, and renders message {number + 1} so that it"
                    " can't be told from the rest; set data.chat_template to one with marks, or data.loss_on=all",
                )
            spans[number] = span
        return [spans[number] for number in turns]

    def _find_alike(self, text: str, turns: list[int]) -> dict[int, Span]:
        """Turns of a kind of which there are many, without rendering each.

        `_find_turn` finds the first and the last of a kind. If it leaves out the same characters at the beginning and
        at the end of the part that each of these messages gave, all others of the kind that begin and end with these
        characters are found by leaving them out. Other turns are missing from the result.
        """
        kinds: dict[tuple[Any, ...], list[int]] = {}
        last_user = max((n for n, message in enumerate(self.messages) if message["role"] == "user"), default=-1)
        for number in turns:
            kinds.setdefault(self._kind(number, last_user), []).append(number)
        kinds = {kind: numbers for kind, numbers in kinds.items() if len(numbers) > 2}
        if not kinds:
            return {}
        try:
            special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
            traced, parts = trace_messages(self.template, self.messages, self.tools, special_tokens)
        except Exception:  # a template that can't be traced is rendered turn by turn
            return {}
        spans: dict[int, Span] = {}
        if traced != text:
            return spans
        for first, *others, last in kinds.values():
            edges = set()
            for number in (first, last):
                try:
                    span, part = self._find_turn(text, number), parts.get(number)
                except BadRow:  # raised again in the order of the turns
                    break
                if span is None or part is None or not part[0] <= span[0] < span[1] <= part[1]:
                    break
                spans[number] = span
                edges.add((text[part[0] : span[0]], text[span[1] : part[1]]))
            else:
                if len(edges) == 1:
                    head, tail = edges.pop()
                    found = {number: self._trim(text, number, parts.get(number), head, tail) for number in others}
                    spans |= {number: span for number, span in found.items() if span is not None}
        return spans

    def _kind(self, number: int, last_user: int) -> tuple[Any, ...]:
        """What templates usually look at when they write a message, other than its words."""
        message = self.messages[number]
        before = self.messages[number - 1]["role"] if number else None
        behind = self.messages[number + 1]["role"] if number + 1 < len(self.messages) else None
        content = message.get("content")
        is_empty = not content.strip() if isinstance(content, str) else type(content)
        return before, behind, number > last_user, is_empty, frozenset(message), bool(message.get("tool_calls"))

    def _trim(self, text: str, number: int, part: Span | None, head: str, tail: str) -> Span | None:
        """A message's part of the text without `head` and `tail`, if it begins and ends so and has its last words."""
        if part is None:
            return None
        whole, content = text[part[0] : part[1]], self.messages[number].get("content")
        said = content.strip().rpartition("\n")[2] if isinstance(content, str) else ""
        if len(whole) <= len(head) + len(tail) or not (whole.startswith(head) and whole.endswith(tail)):
            return None
        span = part[0] + len(head), part[1] - len(tail)
        return span if said in text[span[0] : span[1]] else None

    def _find_turn(self, text: str, number: int) -> Span | None:
        """Finds the assistant's turn `messages[number]`, with its end marker, in the whole conversation `text`.

        It lies between the conversation rendered up to it, with the prompt for it, and the conversation rendered up to
        and with it. Some templates render a turn otherwise once others follow (Qwen3 drops its thoughts, Mistral moves
        the system message, Phi-3 ends with a token of its own). There the turn is what changes with its content, and
        the end marker that follows the content in both.
        """
        messages = self.messages
        before = self.render(messages[:number], prompt=True) if number else None
        after = self.render(messages[: number + 1])
        start = len(before) if before is not None and text.startswith(before) and after.startswith(before) else None
        end = len(after) if text.startswith(after) else None
        if start is not None and end is not None:
            return start, end

        content = messages[number].get("content")
        if not isinstance(content, str):
            return None
        probe = {**messages[number], "content": _PROBE}
        content_start, content_end = _difference(text, self.render(self._with(number, probe)))
        _, last_content_end = _difference(after, self.render([*messages[:number], probe]))
        marker = after[last_content_end:]
        marker_length = _common_tokens(marker, text[content_end : content_end + len(marker)], self.tokenizer)
        if content_start >= content_end or (marker and not marker_length):
            return None
        return (
            content_start if start is None else start,
            content_end + marker_length if end is None else end,
        )


def _tag_call(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with a tag behind the name of the function that it calls first, if it has one."""
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not isinstance(calls[0], dict):
        return message
    call = calls[0]
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return message
    tagged = {**function, "name": f"{function['name']}\ue001{number}\ue002"}
    return {**message, "tool_calls": [{**call, "function": tagged} if function is not call else tagged, *calls[1:]]}


def _difference(text: str, other: str) -> Span:
    """The part of `text` that is not the same in `other`: all between their common start and their common end."""
    return _num_common(text, other), len(text) - _num_common(text[::-1], other[::-1])


def _common_tokens(text: str, other: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length, in characters, of the tokens with which both begin."""
    encoded, other_encoded = (
        tokenizer(t, add_special_tokens=False, return_offsets_mapping=True) for t in (text, other)
    )
    num_tokens = _num_common(encoded["input_ids"], other_encoded["input_ids"])
    return int(encoded["offset_mapping"][num_tokens - 1][1]) if num_tokens else 0


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
