"""Stage 3, format: a checked row → the text that the model sees, and the spans of it that are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.config.schema import DataFormat, LossOn
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.chats.template import Span
from qlora_fsdp.data.row import REFUSED, SYSTEM, BadRow

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context."
    " Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class FormattedRow:
    """Text to tokenize.

    Attributes:
        text: all of it.
        spans: the characters that are trained on.
        is_chat: the chat template wrote the begin and end tokens. Otherwise they are added around the text.
        may_split: a row longer than training.max_length may become several rows, as it has no answer to keep together.
    """

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False
    may_split: bool = False


def format_row(
    form: DataFormat, row: dict[str, Any], loss_on: LossOn, tokenizer: PreTrainedTokenizerBase
) -> FormattedRow:
    """Formats a row that `check_row` let pass.

    Raises:
        BadRow: the chat template refuses it, or its assistant turns can't be told from the rest.
        DataError: there is no chat template.
    """
    match form:
        case DataFormat.messages:
            text, spans = format_messages(row["messages"], row.get("tools"), loss_on, tokenizer)
            _check_words(row, text, tokenizer)
            return FormattedRow(text, spans, is_chat=True)
        case DataFormat.text:
            return FormattedRow(row["text"], ((0, len(row["text"])),), may_split=True)
        case DataFormat.prompt_completion:
            return _complete(row["prompt"], row["completion"], loss_on)
        case DataFormat.instruction:
            prompt = (ALPACA_WITH_INPUT if row.get("input") else ALPACA).format_map(row)
            return _complete(prompt, row["output"], loss_on)
        case DataFormat.auto | DataFormat.sharegpt | DataFormat.random:
            raise AssertionError(f"check_row gives no row the form {form.value}")
        case _:
            assert_never(form)


def _check_words(row: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a conversation of which the template leaves words out.

    It may leave out the system message once it is answered, as Mistral's do, or look for words in other fields.
    """
    messages = row["messages"]
    if messages[0]["role"] in SYSTEM and _leaves_out(row, 0, text, tokenizer):
        reason = "it leaves out the system message, with which generate and chat would begin"
        raise BadRow(REFUSED, f"{reason}; put that into the first message of the user")
    numbers: dict[str, int] = {}  # the first message of each role, as a template writes them alike
    for number, message in enumerate(messages):
        numbers.setdefault(message["role"], number)
    numbers.pop("assistant", None)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        numbers["assistant"] = len(messages) - 1
    for role, number in numbers.items():
        if _leaves_out(row, number, text, tokenizer):
            what = f"what message {number + 1} says, of the {role}"
            raise BadRow(REFUSED, f"it leaves out {what}; set data.chat_template to one that has it")


def _leaves_out(row: dict[str, Any], number: int, text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text of a conversation would be the same with other words in one of its messages."""
    messages = row["messages"]
    content = messages[number].get("content")
    if not isinstance(content, str) or content.rpartition("</think>")[2].strip().rpartition("\n")[2] in text:
        return False  # as nearly always; templates drop thoughts
    others = [*messages[:number], {**messages[number], "content": "other words"}, *messages[number + 1 :]]
    try:
        return format_messages(others, row.get("tools"), LossOn.all, tokenizer)[0] == text
    except BadRow:
        return False


def _complete(prompt: str, completion: str, loss_on: LossOn) -> FormattedRow:
    start = len(prompt) if loss_on is LossOn.completion else 0
    return FormattedRow(prompt + completion, ((start, len(prompt + completion)),))
