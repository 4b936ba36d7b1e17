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
    DataFormat.prompt_completion: ("system", "tools", *NOT_TEXT),
    DataFormat.instruction: ("input", "history"),
}
TURN_KEYS = ("role", "content")  # of the messages in a row, which data.columns renames too
MAX_KEYS = 12  # of a row, that are shown

# What data sets call a prompt and so on, the commonest first.
COMMON_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("prompt", "question", "instruction", "query", "input", "problem", "source", "user", "article"),
    "completion": (
        "completion",
        "answer",
        "response",
        "output",
        "solution",
        "target",
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


def used_columns(names: Sequence[str], data_format: DataFormat, columns: Mapping[str, str]) -> list[str]:
    """The columns of a table that rows need; all of them if the table has no form's columns."""
    forms = list(REQUIRED_KEYS) if data_format is DataFormat.auto else [data_format]
    forms = [form for form in forms if all(columns.get(key, key) in names for key in REQUIRED_KEYS.get(form, ()))]
    wanted = {columns.get(key, key) for form in forms for key in (*REQUIRED_KEYS[form], *MORE_KEYS.get(form, ()))}
    return [name for name in names if name in wanted or not wanted]


def explain_keys(row: Mapping[str, Any], missing: Sequence[str], columns: Mapping[str, str]) -> str:
    """Explain which keys a row lacks, and which setting gives their names.

    Args:
        row: the row as it is in the data.
        missing: the keys of its form that it lacks; none if its form is unknown.
        columns: data.columns, as it is set.
    """
    keys = show_keys(row)
    absent = [ours for ours, theirs in columns.items() if theirs not in row and ours not in TURN_KEYS]
    if absent:
        lacks = " and ".join(f"no {columns[ours]}, which data.columns names for {ours}" for ours in absent)
        return f"{lacks}; keys are {keys}"
    if "chosen" in row and "rejected" in row:
        return f"keys are {keys}: answers to compare; set task=preference or task=reward"
    lacks = f"no {' and no '.join(missing)}; " if missing else ""
    guess = {} if columns else _guess_columns(row)
    if guess:
        pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in guess.items())
        return f"{lacks}keys are {keys}; set data.columns={{{pairs}}}"
    if missing:
        return f"{lacks}keys are {keys}; data.columns={{{missing[0]}: NAME}} says which it is"
    forms = "messages; prompt, completion; instruction, output; or text"
    return f"keys are {keys}, and not {forms}; data.columns={{prompt: NAME, completion: NAME}} says which these are"


def show_keys(row: Mapping[str, Any]) -> str:
    """The keys of a row, for messages."""
    shown = list(row)[:MAX_KEYS]
    if len(row) > MAX_KEYS:
        shown.append("...")
    return ", ".join(shown) or "none"


def _guess_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Guess data.columns for a row of unknown form from common names; empty if there is nothing to guess from."""
    lower = {key.lower(): key for key in row}
    found: dict[str, str] = {}
    for ours, names in COMMON_NAMES.items():
        theirs = _first_of(names, lower)
        if theirs is not None:
            found[ours] = theirs
    forms: list[dict[str, str | None]] = [
        {"messages": found.get("messages")},
        {"prompt": found.get("prompt"), "completion": found.get("completion")},
        {"text": found.get("text")},
    ]
    context = _first_of(("input", "context"), lower)
    if context is not None:  # a prompt alone would leave the context out
        alpaca = {"instruction": lower.get("instruction"), "input": context, "output": found.get("completion")}
        forms.insert(0, alpaca)
    for form in forms:
        if None not in form.values():
            return {ours: theirs for ours, theirs in form.items() if theirs is not None and ours != theirs}
    return {}


def _first_of(names: Sequence[str], lower: Mapping[str, str]) -> str | None:
    """The key of a row that has the first of some names; `lower` has its keys by the same in lower case."""
    return next((lower[name] for name in names if name in lower), None)
