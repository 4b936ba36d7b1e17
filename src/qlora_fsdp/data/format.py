"""Stage 3, format: a checked row → the text that the model sees, and the spans of it that are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.config.schema import DataFormat, LossOn, Thoughts
from qlora_fsdp.data.chats.conversation import format_conversation
from qlora_fsdp.data.chats.template import Span

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
        told: the flags of what is to be told of it (`chats.told`).
    """

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False
    may_split: bool = False
    told: int = 0


def format_row(
    form: DataFormat,
    row: dict[str, Any],
    loss_on: LossOn,
    tokenizer: PreTrainedTokenizerBase,
    thoughts: Thoughts = Thoughts.last,
) -> list[FormattedRow]:
    """Formats a row that `check_row` let pass. It becomes several only by `Thoughts.all`.

    Raises:
        BadRow: the chat template refuses it or leaves some of it out, or its assistant turns can't be told from the
            rest.
        DataError: there is no chat template.
    """
    match form:
        case DataFormat.messages:
            examples = format_conversation(row["messages"], row.get("tools"), loss_on, thoughts, tokenizer)
            return [FormattedRow(text, spans, is_chat=True, told=told) for text, spans, told in examples]
        case DataFormat.text:
            return [FormattedRow(row["text"], ((0, len(row["text"])),), may_split=True)]
        case DataFormat.prompt_completion:
            return [_complete(row["prompt"], row["completion"], loss_on)]
        case DataFormat.instruction:
            prompt = (ALPACA_WITH_INPUT if row.get("input") else ALPACA).format_map(row)
            return [_complete(prompt, row["output"], loss_on)]
        case DataFormat.auto | DataFormat.sharegpt | DataFormat.random:
            raise AssertionError(f"check_row gives no row the form {form.value}")
        case _:
            assert_never(form)


def _complete(prompt: str, completion: str, loss_on: LossOn) -> FormattedRow:
    start = 0 if loss_on.is_everything else len(prompt)
    return FormattedRow(prompt + completion, ((start, len(prompt + completion)),))
