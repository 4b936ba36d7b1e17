"""Columns that nothing reads: the log names them, since one of them may be what the user wants the model to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import MAX_KEYS, MORE_KEYS, rename
from qlora_fsdp.data.layouts import OF_CHATS, is_judgement
from qlora_fsdp.data.parse import parse_row
from qlora_fsdp.data.read import Source, iterate_rows
from qlora_fsdp.data.row import BadRow

TEXTS = ("prompt", "completion", "chosen", "rejected")
FIRST_ROWS = 10  # of a source, that are looked at: `system` may be empty in the very first ones


def note_dropped(source: Source, dropped: dict[str, None]) -> Source:
    """The source, which notes as keys of `dropped` the columns of tables that are not read."""

    def choose(names: Sequence[str]) -> list[str]:
        chosen = source.choose(names)
        dropped.update(dict.fromkeys(name for name in names if name not in chosen))
        return chosen

    return replace(source, choose=choose)


def find_unused(
    rows: Sequence[bytes], source: Source, dropped: Sequence[str], columns: Mapping[str, str]
) -> tuple[str, ...]:
    """The columns of a source that are not used.

    Args:
        rows: its first rows.
        source: knows which columns rows of this task need.
        dropped: the columns that were not read.
        columns: data.columns.
    """
    found = dict.fromkeys(dropped)
    for raw in rows:
        with suppress(BadRow):
            found.update(dict.fromkeys(_unused_of(parse_row(raw), source, columns)))
    unused = list(found)
    return (*unused[:MAX_KEYS], *(["..."] if len(unused) > MAX_KEYS else []))


def _unused_of(row: dict[str, Any], source: Source, columns: Mapping[str, str]) -> list[str]:
    used = set(source.choose(list(row)))
    ours = rename(row, columns)
    if _has_no_conversation(ours, columns):
        of_messages = {columns.get(key, key) for key in MORE_KEYS[DataFormat.prompt_completion]}
        used -= {key for key in of_messages if row.get(key)}
    has_answer = "completion" in ours or "messages" in ours
    if has_answer and not is_judgement(row.get("label")):
        used.discard("label")
    return [key for key in row if key not in used]


def _has_no_conversation(ours: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row, with our names of its columns, is of texts alone, in which nothing of a conversation is read."""
    are_texts = "prompt" in ours and all(isinstance(ours.get(key, ""), str) for key in TEXTS)
    return are_texts and not any(key in columns for key in OF_CHATS)


def look_for_unused(source: Source, columns: Mapping[str, str]) -> tuple[str, ...]:
    """The same of a source that is streamed.

    Raises:
        DataError: it can't be read.
    """
    dropped: dict[str, None] = {}
    rows = [raw for _, raw in islice(iterate_rows(note_dropped(source, dropped)), FIRST_ROWS)]
    return find_unused(rows, source, list(dropped), columns)
