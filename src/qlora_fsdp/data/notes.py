"""What is likely to be a mistake in how rows are written, though the run can go on."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.config.data_sets import as_paths, settings_for
from qlora_fsdp.config.schema import DataConfig, DataFormat
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.calls import ASSISTANT, USER
from qlora_fsdp.data.chats.conversation import read_conversation
from qlora_fsdp.data.chats.markers import add_tokens, check_end_token, check_markers
from qlora_fsdp.data.chats.stops import end_texts_of
from qlora_fsdp.data.chats.template import Conversation, find_variables
from qlora_fsdp.data.message import as_template_sees, find_thoughts
from qlora_fsdp.data.read import find_first, training_paths
from qlora_fsdp.data.row import BadRow, add_system_prompt, holds_turns
from qlora_fsdp.data.tokenizer import encode, with_template

_DATE = re.compile(r"strftime_now\(\s*['\"]([^'\"]+)['\"]")  # transformers' function, with the date's format
MORE_LETTERS = 8  # of an answer are shown, after as many as the prompt for it has


def note_mistakes(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Notes about the training data.

    Raises:
        DataError: the tokenizer can't write a marker of the chat template.
    """
    return [
        *check_markers(tokenizer, spec),
        *check_end_token(tokenizer, spec),
        *check_prompt(tokenizer, spec),
        *check_date(tokenizer, spec),
        *check_arguments(tokenizer, spec),
        *check_end_marker(tokenizer, spec),
        *check_system_prompt(spec),
        *check_turns_as_text(spec),
    ]


def check_prompt(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Returns a note if answers do not begin as the template's prompt for an answer does, with which the model is used.

    The template of DeepSeek-R1's distills opens a thought there, and writes answers without thoughts.
    """
    if tokenizer.chat_template is None or not spec.task.is_causal or spec.settings.format is DataFormat.random:
        return []
    tokenizer = with_template(tokenizer, _first_data(spec))
    thinking = {**ASSISTANT, "reasoning_content": "thoughts"}
    if all(_differ(tokenizer, [USER, answer], None) is None for answer in (ASSISTANT, thinking)):
        return []  # as with nearly every template; no row need be read
    row = _first_conversation(spec)
    messages = [as_template_sees(message) for message in row.get("messages", [])]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    differing = _differ(tokenizer, messages[: answers[0] + 1], row.get("tools")) if answers else None
    if differing is None:
        return []
    header, answer, whole = differing
    thoughts = find_thoughts(messages[answers[0]])
    left_out = ", without its thoughts" if thoughts not in whole else ""
    return [
        f"the chat template's prompt for an answer is {_show(header)}, and it writes the first answer of the data as "
        f"{_show(answer[: len(header) + MORE_LETTERS])}{left_out}. So chat, generate and servers ask for what is not "
        "trained on. Set data.chat_template to a copy in which both begin alike; it is saved with the "
        "adapter."
    ]


def check_date(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Returns a note if the chat template writes the day's date into the first conversation of the data."""
    data = _first_data(spec)
    tokenizer = with_template(tokenizer, data)
    formats = _DATE.findall(str(tokenizer.chat_template))
    row = _first_conversation(spec) if formats else {}
    if not row:
        return []
    text = _write(add_system_prompt(row, data.system_prompt) if data.system_prompt else row, tokenizer)
    dates = [date for date in map(datetime.now().strftime, formats) if date in (text or "")]
    if not dates:
        return []
    return [
        f"the chat template writes the day's date into conversations, {_show(dates[0])} today. Rows keep the date of "
        "the day on which they were tokenized, in later runs too, and generate and chat write that of their own day. "
        "For one date everywhere set data.chat_template to a copy in which it stands; it is saved with the adapter."
    ]


def check_arguments(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Returns a note if the chat template looks at none of a name in data.template_arguments."""
    template = with_template(tokenizer, _first_data(spec)).chat_template
    if not spec.settings.template_arguments or not isinstance(template, str):
        return []
    known = find_variables(template)
    unknown = [name for name in spec.settings.template_arguments if name not in known]
    if not unknown:
        return []
    return [
        f"{show('data.template_arguments', spec.settings.template_arguments)} has {', '.join(unknown)}, at which the"
        " chat template never looks, so that it changes nothing."
    ]


def check_end_marker(tokenizer: PreTrainedTokenizerBase, spec: DataSpec) -> list[str]:
    """Returns a note if the chat template ends answers with several tokens, at which servers do not stop."""
    tokenizer = with_template(tokenizer, _first_data(spec))
    if not isinstance(tokenizer.chat_template, str) or not _first_conversation(spec):
        return []
    markers = end_texts_of(tokenizer)
    if not markers:
        return []
    num_tokens = len(encode(tokenizer, markers[0]))
    return [
        f"the chat template ends answers with {_show(markers[0])}, which is {num_tokens} tokens. The model learns to"
        " say them, and generate, chat and evaluate stop there. Servers do not stop there by themselves: give them"
        f" stop={_show(markers[0])}, or set {add_tokens(markers[:1])}, which makes one token of it."
    ]


def check_system_prompt(spec: DataSpec) -> list[str]:
    """Returns a note if the data that data.system_prompt is for begins with a row that is no conversation."""
    data = _first_data(spec)
    found = find_first(spec) if data.system_prompt is not None else None
    if found is None or found[0] is DataFormat.messages:
        return []
    return [
        f"{show('data.system_prompt', data.system_prompt)} is written into conversations alone, and the first row of "
        f"{training_paths(spec.settings)[0]} is none: its form is {found[0].value}."
    ]


def check_turns_as_text(spec: DataSpec) -> list[str]:
    """Returns a note if the first row has text that is a list of messages, as a column of a CSV file has it.

    Its brackets and names of roles are trained on. They may be meant: somebody trains a model to write such lists. In a
    prompt or in answers to compare they are not, and such rows are left out.
    """
    form, row = (find_first(spec) if _is_at_hand(spec) else None) or (None, {})
    if form is DataFormat.messages:
        row = {f"the content of message {number}": turn["content"] for number, turn in enumerate(row["messages"], 1)}
    name = next((name for name, value in row.items() if holds_turns(value)), None)
    if name is None:
        return []
    return [
        f"{name} of the first row is text that holds a list of messages, and is trained on as that text, with its "
        "brackets and roles. For the chat template to write the messages, give the list itself: JSONL, or json.loads "
        "of that column."
    ]


def _is_at_hand(spec: DataSpec) -> bool:
    """Whether the first data set is in files here. Another source may take seconds to be opened."""
    paths = training_paths(spec.settings)
    return bool(paths) and all(path_exists(path) for path in as_paths(paths[0]))


def _first_data(spec: DataSpec) -> DataConfig:
    """The settings of the first data set, to which the rows belong that are looked at."""
    paths = training_paths(spec.settings)
    return settings_for(paths[0], spec.settings) if paths else spec.settings


def _first_conversation(spec: DataSpec) -> dict[str, Any]:
    """The first training row, if it is a conversation; else empty."""
    form, row = find_first(spec) or (None, {})
    return row if form is DataFormat.messages else {}


def _write(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What the chat template makes of a conversation; None: it can't, which is told where the row is tokenized."""
    try:
        conversation = read_conversation(row["messages"], row.get("tools"), tokenizer)
        return conversation.render(conversation.messages)
    except (BadRow, DataError):
        return None


def _differ(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any
) -> tuple[str, str, str] | None:
    """The prompt for a last answer, what the template writes in its place, and the conversation; None: it begins so."""
    conversation = Conversation(messages, tools, tokenizer.get_chat_template(tools=tools), tokenizer)
    try:
        prompt, text = conversation.render(messages[:-1], prompt=True), conversation.render(messages)
        before = conversation.render(messages[:-1])
    except BadRow:
        return None
    if text.startswith(prompt) or not (text.startswith(before) and prompt.startswith(before)):
        return None
    return prompt[len(before) :], text[len(before) :], text


def _show(text: str) -> str:
    return json.dumps(text[:80], ensure_ascii=False)
