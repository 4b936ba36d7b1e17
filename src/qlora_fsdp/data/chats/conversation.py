"""Conversations: the text that the chat template makes of them, and the characters of it that are trained on."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import shorten
from qlora_fsdp.config.schema import LossOn, Thoughts
from qlora_fsdp.data.chats.calls import write_calls
from qlora_fsdp.data.chats.markers import explain_no_template
from qlora_fsdp.data.chats.template import Conversation, Span, Trace, has_generation_marks
from qlora_fsdp.data.chats.told import OWN_CONVERSATIONS, THOUGHTS_LEFT_OUT, find_lost_thoughts, find_told
from qlora_fsdp.data.chats.turns import can_trace, find_turns
from qlora_fsdp.data.chats.written import check_fields, check_last_answer, check_words, check_written
from qlora_fsdp.data.message import as_template_sees, is_trained, without_thoughts
from qlora_fsdp.data.row import EMPTY, NO_TARGET, BadRow


class Example(NamedTuple):
    """A conversation as it is trained on.

    Attributes:
        text: all of it.
        spans: the characters that are trained on.
        told: the flags of `told`.
    """

    text: str
    spans: tuple[Span, ...]
    told: int


def format_conversation(
    messages: list[dict[str, Any]], tools: Any, loss_on: LossOn, thoughts: Thoughts, tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """What a row of messages becomes: one example, or several with `Thoughts.all`.

    Raises:
        BadRow: the chat template refuses it or leaves some of it out, or its assistant turns can't be told from the
            rest.
        DataError: there is no chat template.
    """
    if thoughts is Thoughts.none:
        messages = [without_thoughts(message) for message in messages]
    whole = format_messages(messages, tools, loss_on, tokenizer)
    check_words(read_conversation(messages, tools, tokenizer), whole.text)
    if thoughts is not Thoughts.all or not whole.told & THOUGHTS_LEFT_OUT:
        return [whole]
    return _train_on_all_thoughts(messages, tools, _find_trained(messages, loss_on), whole, tokenizer)


def format_messages(
    messages: list[dict[str, Any]], tools: Any, loss_on: LossOn, tokenizer: PreTrainedTokenizerBase
) -> Example:
    """A conversation as one example.

    Raises:
        BadRow, DataError: as above.
    """
    conversation = read_conversation(messages, tools, tokenizer)
    trained = _find_trained(messages, loss_on)
    if not loss_on.is_everything:
        _check_answers(conversation.messages, trained)
        return _write(conversation, trained)
    trace = _trace(conversation)
    text = conversation.render(conversation.messages) if trace is None else trace.text
    check_written(conversation, text, trace)
    return Example(text, ((0, len(text)),), 0)


def _write(conversation: Conversation, trained: list[bool]) -> Example:
    """The text of a conversation, and what is trained on of the answers to train on."""
    has_marks = has_generation_marks(conversation.template)
    trace = _trace(conversation)
    if trace is not None:
        text, marks = trace.text, trace.marks
    elif has_marks:
        text, marks = conversation.render_marks()
    else:
        text, marks = conversation.render(conversation.messages), []
    check_written(conversation, text, trace)
    check_fields(conversation, text, trained)
    if has_marks:
        spans = _choose_marks(marks, trace, conversation.messages, trained)
    else:
        try:
            text, spans = find_turns(conversation, text, trace, trained)
        except BadRow:
            check_last_answer(conversation, text)  # which says more
            raise
    return Example(text, tuple(spans), find_told(conversation, text, spans, trained))


def _train_on_all_thoughts(
    messages: list[dict[str, Any]], tools: Any, trained: list[bool], whole: Example, tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """The whole conversation, and beginnings of it that end with answers whose thoughts the whole one has not.

    Each answer is trained on once. From the last answer without its thoughts backwards, the conversation up to it is
    rendered, as it is at inference when that answer is given: the template then writes the thoughts of this one, and of
    those before it that belong to the same question. What has no thoughts there either stays in the whole.
    """

    def write(length: int, numbers: list[int]) -> tuple[Example, list[int]]:
        """The first messages with some answers trained on, and which of these have no thoughts."""
        conversation = read_conversation(messages[:length], tools, tokenizer)
        targets = [number in numbers for number in range(length)]
        example = _write(conversation, targets)
        return example, find_lost_thoughts(conversation, example.text, example.spans, targets)

    targets = [number for number, is_target in enumerate(trained) if is_target]
    _, waiting = write(len(messages), targets)
    beginnings: list[Example] = []
    done: set[int] = set()
    while waiting:
        end = waiting[-1]
        try:
            example, left_out = write(end + 1, waiting)
        except BadRow:  # the template refuses a conversation that ends here
            left_out = [end]
        if end in left_out:
            waiting = waiting[:-1]
            continue
        found = [number for number in waiting if number not in left_out]
        if left_out:
            example, _ = write(end + 1, found)
        beginnings.append(example)
        done.update(found)
        waiting = left_out
    if not beginnings:
        return [whole]
    rest = [number for number in targets if number not in done]
    examples = beginnings[::-1]
    if rest:
        examples.append(write(len(messages), rest)[0])
    return [examples[0]._replace(told=examples[0].told | OWN_CONVERSATIONS), *examples[1:]]


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
        fix = "" if {"user", "system"} >= roles.keys() else "; write assistant for the role of who answers"
        raise BadRow(NO_TARGET, f"no message of the assistant (roles: {shorten(', '.join(roles))}{fix})")
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
