"""The names that data has for the fields of a row: those that each form needs, and data.columns, which says others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_fsdp.config.schema import DataFormat

REQUIRED_KEYS = {
    DataFormat.messages: ("messages",),
    DataFormat.sharegpt: ("conversations",),
    DataFormat.prompt_completion: ("prompt", "completion"),
    DataFormat.instruction: ("instruction", "output"),
    DataFormat.text: ("text",),
}

NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # what messages refer to

# Keys that a row of the form may have besides.
MORE_KEYS = {
    DataFormat.messages: ("system", "tools", *NOT_TEXT),
    DataFormat.sharegpt: ("system", "tools", *NOT_TEXT),
    DataFormat.prompt_completion: ("system", "tools", "reasoning_content", *NOT_TEXT),
    DataFormat.instruction: ("input", "history"),
}
TURN_KEYS = ("role", "content")  # of the messages in a row, which data.columns renames too
MAX_KEYS = 12  # of a row, that are shown

# What data sets call a prompt and so on, the commonest first.
COMMON_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("prompt", "question", "instruction", "query", "input", "problem", "source", "inputs", "user", "article"),
    "completion": (
        "completion",
        "answer",
        "response",
        "output",
        "solution",
        "target",
        "targets",
        "assistant",
        "reply",
        "summary",
        "abstract",
        "highlights",
    ),
    "text": ("text", "content", "body", "sentence", "raw_content", "code"),
}


def rename(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with the names of this project for the columns that data.columns names. Others keep their name."""
    if not columns:
        return row
    kept = {key: value for key, value in row.items() if key not in columns and key not in columns.values()}
    return kept | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def form_columns(names: Sequence[str], data_format: DataFormat, columns: Mapping[str, str]) -> set[str]:
    """The columns that the forms need of which a table has all that a row must have."""
    forms = list(REQUIRED_KEYS) if data_format is DataFormat.auto else [data_format]
    forms = [form for form in forms if all(columns.get(key, key) in names for key in REQUIRED_KEYS.get(form, ()))]
    return {columns.get(key, key) for form in forms for key in (*REQUIRED_KEYS[form], *MORE_KEYS.get(form, ()))}


def find_absent(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """What data.columns names and a row does not have, in words; empty: it has all."""
    absent = [ours for ours, theirs in columns.items() if theirs not in row and ours not in TURN_KEYS]
    return " and ".join(f"no {columns[ours]}, which data.columns names for {ours}" for ours in absent)


def show_keys(row: Mapping[str, Any]) -> str:
    """The keys of a row, for messages."""
    shown = list(row)[:MAX_KEYS]
    if len(row) > MAX_KEYS:
        shown.append("...")
    return ", ".join(shown) or "none"
