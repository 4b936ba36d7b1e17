"""Stage 2, row, for language models: a parsed row → a row of a known form, or a `BadRow` that says what to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import REQUIRED_KEYS, TURN_KEYS, find_absent, show_keys
from qlora_fsdp.data.guess import (
    CHOSEN_NAMES,
    REJECTED_NAMES,
    first_working,
    guess_answers,
    guess_columns,
    name_left_out,
    names_of,
    show_columns,
)
from qlora_fsdp.data.layouts import ANSWERS, read_layout
from qlora_fsdp.data.read_answers import PROMPT_NAMES, read_answers
from qlora_fsdp.data.row import WRONG_KEYS, BadRow, check_row


def read_row(
    found: dict[str, Any], data_format: DataFormat, columns: Mapping[str, str]
) -> tuple[DataFormat, dict[str, Any]]:
    """A row of a known form, checked.

    Args:
        found: the row, as `parse_row` gives it.
        data_format: the form of the rows; `auto`: it is told by their keys, or by their layout.
        columns: the names that the data has for the keys of the form, where they differ (data.columns).

    Returns:
        The form and the row, as `check_row` gives them.

    Raises:
        BadRow: the row can't be used. Where its keys are unknown it says which setting reads it, if one does.
    """
    row, form = read_layout(found, data_format, columns)
    if form is DataFormat.auto:
        known = _detect(row)
        if known is None:
            raise BadRow(WRONG_KEYS, _explain(found, (), columns))
        form = known
    missing = [key for key in REQUIRED_KEYS[form] if key not in row]
    if missing:
        raise BadRow(WRONG_KEYS, _explain(found, missing, columns))
    return check_row(row, form, {key: columns[key] for key in TURN_KEYS if key in columns})


def _detect(row: dict[str, Any]) -> DataFormat | None:
    """The form of a row under the names of this project; None: it has the keys of none.

    A table that was joined of several has the columns of all their forms, null where a row is of another one.
    """
    for there in ([key for key, value in row.items() if value is not None], list(row)):
        for form, keys in REQUIRED_KEYS.items():
            if all(key in there for key in keys):
                return form
    return None


def _explain(found: dict[str, Any], missing: list[str] | tuple[()], columns: Mapping[str, str]) -> str:
    """Explain which keys a row lacks, and which settings read it.

    Args:
        found: the row as it is in the data.
        missing: the keys of its form that it lacks; none if its form is unknown.
        columns: data.columns, as it is set.
    """
    keys = show_keys(found)
    absent = find_absent(found, columns)
    if absent:
        return f"{absent}; keys are {keys}"
    lacks = f"no {' and no '.join(missing)}; " if missing else ""
    compared = _name_answers(found)
    if compared:
        return f"{lacks}keys are {keys}: {compared}"
    guess = (
        {}
        if columns
        else first_working(guess_columns(found), lambda guessed: read_row(found, DataFormat.auto, guessed))
    )
    if guess:
        left_out = name_left_out(found, guess)
        warning = f", which leaves out {', '.join(left_out)}" if left_out else ""
        return f"{lacks}keys are {keys}; set {show_columns(guess)}{warning}"
    if missing:
        return f"{lacks}keys are {keys}; data.columns={{{missing[0]}: NAME}} says which it is"
    forms = "messages; prompt, completion; instruction, output; or text"
    return f"keys are {keys}, and not {forms}; data.columns={{prompt: NAME, completion: NAME}} says which these are"


def _name_answers(found: dict[str, Any]) -> str:
    """What answers to compare a row has, and the settings that read them; empty: it has none."""
    about = next((layout.about for layout in ANSWERS if layout.is_of(found)), "")
    if not about and names_of(found, CHOSEN_NAMES) and names_of(found, REJECTED_NAMES):
        about = "answers to compare"
    if not about:
        return ""
    guess = first_working([{}, *guess_answers(found, PROMPT_NAMES)], lambda guessed: read_answers(found, True, guessed))
    more = f", and {show_columns(guess)}" if guess else ""
    return f"{about}; set task=preference or task=reward{more}"
