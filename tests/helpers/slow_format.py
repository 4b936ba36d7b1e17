"""The reference for conversations: a whole render for each call of a tool, and two prefixes for each answer.

It takes quadratic time and looks at every turn by itself, so `data/chats/conversation.py` must find the same text and
spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.calls import write_calls
from qlora_fsdp.data.chats.template import Span, has_generation_marks
from qlora_fsdp.data.format import FormattedRow
from qlora_fsdp.data.message import TRAIN_KEYS, is_trained
from qlora_fsdp.data.row import EMPTY, NO_TARGET, REFUSED, BadRow


def slow_format(
    messages: list[dict[str, Any]], tools: Any, loss_on: LossOn, tokenizer: PreTrainedTokenizerBase
) -> FormattedRow:
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
    messages = write_calls(messages, template, tokenizer)

    def render(messages: list[dict[str, Any]], *, prompt: bool = False, marks: bool = False) -> tuple[str, list[Span]]:
        special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(  # annotated as str, but a pair: texts, and spans of marks
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **special_tokens,
            )
        except Exception as error:  # templates compute, and their sandbox lets any error through
            raise BadRow(REFUSED, str(error) or repr(error)) from error
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    _check_calls(messages, lambda messages: render(messages)[0])
    if loss_on is LossOn.all:
        text, _ = render(messages)
        return FormattedRow(text, ((0, len(text)),), is_chat=True)
    if has_generation_marks(template):
        text, spans = render(messages, marks=True)
        answers = [
            is_target for is_target, message in zip(trained, messages, strict=True) if message["role"] == "assistant"
        ]
        if all(answers):
            return FormattedRow(text, tuple(spans), is_chat=True)
        if len(spans) != len(answers):
            raise BadRow(
                NO_TARGET, f"the chat template marks {len(spans)} of {len(answers)} answers, some not to train on"
            )
        return FormattedRow(
            text, tuple(s for s, is_target in zip(spans, answers, strict=True) if is_target), is_chat=True
        )

    text, _ = render(messages)
    for number, message in enumerate(messages):  # words of a call that the template leaves out, and not in a prefix
        silent = {"role": message["role"], "content": "", "tool_calls": message.get("tool_calls")}
        without = [*messages[:number], silent, *messages[number + 1 :]]
        if silent["tool_calls"] and render(without)[0] == text:
            messages = without
    spans = []
    for number, is_target in enumerate(trained):
        if not is_target:
            continue
        span = _turn_span(text, messages, number, lambda *args, **kwargs: render(*args, **kwargs)[0], tokenizer)
        if span is None:
            raise BadRow(
                NO_TARGET,
                f"the chat template has no {{% generation %}} marks, and renders message {number + 1} so that it can't"
                " be told from the rest; set data.chat_template to one with marks, or data.loss_on=all",
            )
        spans.append(span)
    return FormattedRow(text, tuple(spans), is_chat=True)


def _check_answers(messages: list[dict[str, Any]], trained: list[bool]) -> None:
    """Refuse a conversation with nothing to train on, or with silence."""
    roles = dict.fromkeys(message["role"] for message in messages)
    if "assistant" not in roles:
        raise BadRow(NO_TARGET, f"no message of the assistant (roles: {', '.join(roles)})")
    if not any(trained):
        raise BadRow(NO_TARGET, "no message of the assistant is to be trained on")
    for number, (message, is_target) in enumerate(zip(messages, trained, strict=True), start=1):
        said = [value for key, value in message.items() if key not in ("role", *TRAIN_KEYS)]
        if is_target and not any(value.strip() if isinstance(value, str) else value for value in said):
            raise BadRow(EMPTY, f"message {number}, an answer to train on, is empty")


def _check_calls(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    """Refuse a template that leaves calls of tools out: the model would learn to say nothing where it should call."""
    calling = [number for number, message in enumerate(messages) if message.get("tool_calls")]
    text = render(messages) if calling else ""
    for number in calling:
        calls = messages[number]["tool_calls"]
        without = {key: value for key, value in messages[number].items() if key != "tool_calls"}
        fewer = [{"content": "", **without}]
        if len(calls) > 1:
            fewer += [{**messages[number], "tool_calls": calls[:n] + calls[n + 1 :]} for n in range(len(calls))]
        for message in fewer:
            try:
                is_left_out = text == render([*messages[:number], message, *messages[number + 1 :]])
            except BadRow:  # a template that can't do without them writes them
                is_left_out = False
            if is_left_out:
                what = f"it leaves out {'one of ' if 'tool_calls' in message else ''}the tool_calls of message"
                raise BadRow(REFUSED, f"{what} {number + 1}; set data.chat_template to one that has them")


def _turn_span(
    text: str,
    messages: list[dict[str, Any]],
    number: int,
    render: Callable[..., str],
    tokenizer: PreTrainedTokenizerBase,
) -> Span | None:
    """Finds the assistant turn `messages[number]`, with its end marker, in the whole conversation `text`.

    It lies between the conversation rendered up to it, with the prompt for it, and the conversation rendered up to and
    with it. Some templates render a turn otherwise once others follow (Qwen3 drops its thoughts, Mistral moves the
    system message, Phi-3 ends with a token of its own); there it is what changes with its content, and the end marker
    that follows the content in both.

    Args:
        text: `render(messages)`.
        messages: the conversation.
        number: of the turn, from 0.
        render: renders a conversation; with `prompt=True` followed by the prompt for an assistant turn.
        tokenizer: end markers are compared token by token.
    """
    before = render(messages[:number], prompt=True) if number else None
    after = render(messages[: number + 1])
    start = len(before) if before is not None and text.startswith(before) and after.startswith(before) else None
    end = len(after) if text.startswith(after) else None
    if start is not None and end is not None:
        return start, end

    content = messages[number].get("content")
    if not isinstance(content, str):
        return None
    probe = {**messages[number], "content": _PROBE}
    content_start, content_end = _difference(text, render([*messages[:number], probe, *messages[number + 1 :]]))
    _, last_content_end = _difference(after, render([*messages[:number], probe]))
    marker = after[last_content_end:]
    marker_length = _common_tokens(marker, text[content_end : content_end + len(marker)], tokenizer)
    if content_start >= content_end or (marker and not marker_length):
        return None
    return (
        content_start if start is None else start,
        content_end + marker_length if end is None else end,
    )


_PROBE = "\ue000"  # of Unicode's private use area: in no text


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
