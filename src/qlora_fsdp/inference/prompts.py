"""Prompts and conversations as token ids, in batches that are padded on the left."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import assert_never

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.chats.conversation import read_conversation
from qlora_fsdp.data.chats.written import check_words, check_written
from qlora_fsdp.data.format import ALPACA
from qlora_fsdp.data.row import BadRow, add_system_prompt, check_row
from qlora_fsdp.data.tokenizer import ContainedTokenizer, begin_tokens

ANOTHER_TEMPLATE = "set data.chat_template=chatml (or llama3, alpaca, or a Jinja file)"


class PromptStyle(Enum):
    """How a prompt becomes what the model goes on from."""

    chat = "a user's turn, by the chat template"
    alpaca = "an instruction, in Alpaca's words"
    plain = "as they are"


def choose_style(
    tokenizer: PreTrainedTokenizerBase, trained_on: DataFormat | None, raw: bool
) -> tuple[PromptStyle, str]:
    """How prompts are written, so that the model finds them as in training; and why, as the end of a sentence.

    Args:
        tokenizer: the model's.
        trained_on: the form of the rows that the adapter was trained on; None if it is unknown, as for a base without
            an adapter. A chat template then tells a model that answers from one that goes on with text.
        raw: the user wants prompts as they are.
    """
    if raw:
        return PromptStyle.plain, "raw=true"
    match trained_on:
        case DataFormat.messages:
            return PromptStyle.chat, "the adapter was trained on chats"
        case DataFormat.instruction:
            return PromptStyle.alpaca, "the adapter was trained on instructions"
        case DataFormat.prompt_completion | DataFormat.text:
            return PromptStyle.plain, f"the adapter was trained on {trained_on.value} rows"
        case None | DataFormat.auto | DataFormat.sharegpt | DataFormat.random:  # none of these is a form of rows
            if tokenizer.chat_template is None:
                return PromptStyle.plain, "the tokenizer has no chat template"
            return PromptStyle.chat, "the tokenizer has one; raw=true leaves it out"
        case _:
            assert_never(trained_on)


def style_tokens(
    style: PromptStyle,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    place: str,
    system: str | None = None,
    tools: Any = None,
) -> list[int]:
    """A prompt's tokens in a style; `system` is what conversations begin with, and they have `tools`.

    Raises:
        DataError: there is no chat template, or it refuses the prompt.
    """
    match style:
        case PromptStyle.chat:
            return chat_tokens(tokenizer, [{"role": "user", "content": prompt}], tools, place, system)
        case PromptStyle.alpaca:
            return prompt_tokens(tokenizer, ALPACA.format(instruction=prompt))
        case PromptStyle.plain:
            return prompt_tokens(tokenizer, prompt)
        case _:
            assert_never(style)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A prompt's tokens as in training: after what the tokenizer puts before a text, once, without an end token."""
    begin = begin_tokens(tokenizer)
    tokens = ContainedTokenizer(tokenizer).encode(prompt)
    return tokens if tokens[: len(begin)] == begin else begin + tokens


def check_template(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Check that there is a chat template, without which a conversation has no tokens.

    Raises:
        DataError: there is none.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"{place}: the tokenizer has no chat template. To use one, {ANOTHER_TEMPLATE}.")


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any, place: str, system: str | None = None
) -> list[int]:
    """A conversation's tokens by the chat template, as in training, with the beginning of the assistant's next turn.

    Args:
        tokenizer: the model's.
        messages: the turns.
        tools: JSON schemas, or a list of them as text; or None.
        place: where the conversation stands, for messages.
        system: what conversations without a system message begin with; or None.

    Raises:
        DataError: there is no template, it refuses the conversation, or this is none.
    """
    check_template(tokenizer, place)
    try:
        _, row = check_row({"messages": messages, "tools": tools}, DataFormat.messages, {})
    except BadRow as bad:
        raise DataError(f"{place}: {bad.kind}: {bad.detail}. Correct it.") from bad
    row = add_system_prompt(row, system) if system else row
    try:
        conversation = read_conversation(row["messages"], row["tools"], tokenizer)
        text = conversation.render(conversation.messages, prompt=True)
        written = conversation.render(conversation.messages)
        check_written(conversation, written)
        check_words(conversation, written)
    except DataError:
        raise
    except BadRow as bad:
        raise DataError(f"{place}: {bad.kind}: {bad.detail}. Correct it.") from bad
    except Exception as error:  # a template is a program, and its sandbox lets any error through
        raise DataError(
            f"{place}: the chat template can't be applied: {error}. Correct it, or {ANOTHER_TEMPLATE}."
        ) from error
    return ContainedTokenizer(tokenizer).encode(text)


def pad_left(rows: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of a batch: int64 [num_rows, longest] each."""
    longest = max(map(len, rows))
    input_ids = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return torch.from_numpy(input_ids), torch.from_numpy(mask)
