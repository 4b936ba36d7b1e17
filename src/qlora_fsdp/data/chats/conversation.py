"""Conversations: the text that the chat template makes of them, and the characters of it that are trained on."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import LossOn
from qlora_fsdp.data.chats.calls import write_calls
from qlora_fsdp.data.chats.markers import explain_no_template
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, has_generation_marks
from qlora_fsdp.data.chats.told import find_told
from qlora_fsdp.data.chats.turns import can_trace, find_turns
from qlora_fsdp.data.chats.written import check_fields, check_last_answer, check_written
from qlora_fsdp.data.message import as_template_sees, is_trained
from qlora_fsdp.data.row import EMPTY, NO_TARGET, BadRow


def format_messages(
    messages: list[dict[str, Any]], tools: Any, loss_on: LossOn, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, tuple[Span, ...], int]:
    """The text of a conversation, the characters of it that are trained on, and the flags of `told`.

    Raises:
        BadRow: the chat template refuses it or leaves some of it out, or its assistant turns can't be told from the
            rest.
        DataError: there is no chat template.
    """
    trained = _find_trained(messages, loss_on)
    conversation = read_conversation(messages, tools, tokenizer)
    messages, template = conversation.messages, conversation.template
    if not loss_on.is_everything:
        _check_answers(messages, trained)

    has_marks = not loss_on.is_everything and has_generation_marks(template)
    trace = _trace(conversation)
    if trace is not None:
        text, marks = trace.text, trace.marks
    else:
        text, marks = conversation.render_marks() if has_marks else (conversation.render(messages), [])
    check_written(conversation, text, trace)
    if loss_on.is_everything:
        return text, ((0, len(text)),), 0
    check_fields(conversation, text, trained)
    if has_marks:
        spans = _choose_marks(marks, trace, messages, trained)
    else:
        try:
            text, spans = find_turns(conversation, text, trace, trained)
        except BadRow:
            check_last_answer(conversation, text)  # which says more
            raise
    return text, tuple(spans), find_told(conversation, text, spans, trained)


def _find_trained(messages: list[dict[str, Any]], loss_on: LossOn) -> list[bool]:
    """For each message whether it is an answer to train on."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if loss_on is LossOn.last else answers
    return [number in wanted and is_trained(message) for number, message in enumerate(messages)]


def read_conversation(messages: list[dict[str, Any]], tools: Any, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Checked messages as the chat template sees them, without what is for training alone.

    Raises:
        DataError: there is no chat template.
    """
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise DataError(explain_no_template(tokenizer)) from error
    messages = write_calls([as_template_sees(message) for message in messages], template, tokenizer)
    return Conversation(messages, tools, template, tokenizer)


def _trace(conversation: Conversation) -> Trace | None:
    """The one render that a conversation takes; None: the template can't be traced, or refuses the conversation."""
    if not can_trace(conversation.template, conversation.tokenizer):
        return None
    try:
        return conversation.trace()
    except DataError:
        raise
    except Exception:  # transformers' own render tells what is wrong
        return None


def _check_answers(messages: list[dict[str, Any]], trained: list[bool]) -> None:
    """Refuses a conversation that has nothing to train on, or an empty answer to train on."""
    roles = dict.fromkeys(message["role"] for message in messages)
    if "assistant" not in roles:
        raise BadRow(NO_TARGET, f"no message of the assistant (roles: {shorten(', '.join(roles))})")
    if not any(trained):
        raise BadRow(NO_TARGET, "no message of the assistant is to be trained on")
    for number, (message, is_target) in enumerate(zip(messages, trained, strict=True), start=1):
        said = [value for key, value in message.items() if key != "role"]
        if is_target and not any(value.strip() if isinstance(value, str) else value for value in said):
            raise BadRow(EMPTY, f"message {number}, an answer to train on, is empty")


def _choose_marks(
    marks: list[Span], trace: Trace | None, messages: list[dict[str, Any]], trained: list[bool]
) -> list[Span]:
    """The spans of the template's marks that belong to answers to train on."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if all(trained[number] for number in answers):
        return marks
    if trace is not None:
        owners = {number: trace.parts.get(number, []) for number in answers}
        found = [[n for n, parts in owners.items() if any(s <= start < e for s, e in parts)] for start, _ in marks]
        if all(len(numbers) == 1 for numbers in found):
            return [mark for mark, (number,) in zip(marks, found, strict=True) if trained[number]]
    if len(marks) != len(answers):
        raise BadRow(NO_TARGET, f"the chat template marks {len(marks)} of {len(answers)} answers, some not to train on")
    return [mark for mark, number in zip(marks, answers, strict=True) if trained[number]]
