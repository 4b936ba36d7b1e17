"""Stage 2, row, for preferences: a parsed row with answers to compare → each answer with its prompt.

A pair is {"prompt": ..., "chosen": ..., "rejected": ...}, each text or a list of messages; without a prompt it is what
both answers begin with. {"prompt": ..., "responses": [...], "ranks": [...]} is a ranked list, of which every answer
makes a pair with every worse one. An answer with a label is {"prompt": ..., "completion": ..., "label": true}. Rows of
other layouts become one of these (`layouts`). Prompt and answer are written and tokenized as a row of
`prompt_completion` or of `messages` is, with the loss on the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from qlora_fsdp.common.text import num_common
from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import COMMON_NAMES, MORE_KEYS, NOT_TEXT, TURN_KEYS, rename, show_keys
from qlora_fsdp.data.guess import find_system, first_working, guess_answers, show_columns
from qlora_fsdp.data.layouts import ANSWERS, LABEL_VALUES, OF_CHATS, layout_columns, read_answers_layout
from qlora_fsdp.data.message import role_of
from qlora_fsdp.data.row import (
    EMPTY,
    SAME_ANSWERS,
    WRONG_KEYS,
    WRONG_LABEL,
    WRONG_TYPES,
    BadRow,
    as_messages,
    check_row,
    join_answer,
    refuse_turns_as_text,
    type_name,
)
from qlora_fsdp.data.turn_shapes import begins_answer

PAIR_KEYS = ("chosen", "rejected")
JUDGED_KEYS = ("completion", "label")
# What data sets call a prompt, of text or of turns.
PROMPT_NAMES = ("question", "instruction", "query", "problem", "input", *COMMON_NAMES["messages"])
RESPONSES, RANKS, SCORES = "responses", "ranks", "scores"
MAX_RESPONSES = 32  # of a row, which are 496 pairs
MARGIN, MAX_MARGIN = "margin", 1e6


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer, as a row of a form that `format_row` knows. In a pair it has no label."""

    form: DataFormat
    fields: dict[str, Any]
    label: bool | None = None


def read_answers(found: dict[str, Any], is_paired: bool, columns: Mapping[str, str]) -> list[Answer]:
    """The answers of a parsed row, each with its prompt: chosen and rejected one of each pair, or one with a label.

    A pair where labels are wanted becomes two answers, a good one and a bad one.

    Raises:
        BadRow: the row can't be used.
    """
    row = read_answers_layout(found, columns)
    turn_columns = {key: columns[key] for key in TURN_KEYS if key in columns}
    is_chat = any(key in columns for key in OF_CHATS)
    has_pair = all(key in row for key in PAIR_KEYS)
    _check_prompt(row)
    if is_paired and not has_pair and RESPONSES in row:
        pairs = [row | dict(zip(PAIR_KEYS, pair, strict=True)) for pair in _ranked_pairs(row)]
        return [answer for pair in pairs for answer in _read_pair(pair, (None, None), turn_columns, is_chat)]
    keys = PAIR_KEYS if is_paired or has_pair else ("prompt", *JUDGED_KEYS)
    missing = [key for key in keys if key not in row]
    if missing:
        lacks = f"no {' and no '.join(missing)}; keys are {show_keys(found)}"
        if is_paired and all(key in row for key in JUDGED_KEYS):
            raise BadRow(WRONG_KEYS, f"{lacks}; task=preference preference.loss=kto takes labels")
        if not columns:
            guesses = guess_answers(found, PROMPT_NAMES)
            guess = first_working(guesses, lambda guessed: read_answers(found, is_paired, guessed))
            if guess:
                raise BadRow(WRONG_KEYS, f"{lacks}; set {show_columns(guess)}")
        raise BadRow(WRONG_KEYS, f"{lacks}; data.columns={{{missing[0]}: NAME}} says which it is")
    if has_pair:
        return _read_pair(row, (None, None) if is_paired else (True, False), turn_columns, is_chat)
    return [_answer(row, row["prompt"], "completion", turn_columns, _read_label(row["label"]), is_chat)]


def _check_prompt(row: Mapping[str, Any]) -> None:
    """See that no prompt is left unread because its column has another name: without one, rows would still be pairs.

    A row without answers lacks those first.

    Raises:
        BadRow: there is such a column, and its text is in none of the answers, which may be whole conversations.
    """
    if "prompt" in row or not any(key in row for key in (*PAIR_KEYS, RESPONSES, JUDGED_KEYS[0])):
        return
    answers = json.dumps([row.get(key) for key in (*PAIR_KEYS, RESPONSES)])
    for name in PROMPT_NAMES:
        text = _first_text(row.get(name))
        if text.strip() and json.dumps(text)[1:-1] not in answers:
            guess = {**find_system(row), "prompt": name}
            raise BadRow(WRONG_KEYS, f"no prompt; keys are {show_keys(row)}; set {show_columns(guess)}")


def _first_text(value: Any) -> str:
    """A text, or the text of the first of some turns; empty where there is none."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        turn = value[0]
        value = turn.get("content", turn.get("value"))
    return value if isinstance(value, str) else ""


def _read_pair(
    row: Mapping[str, Any],
    labels: tuple[bool | None, bool | None],
    turn_columns: Mapping[str, str],
    is_chat: bool,
) -> list[Answer]:
    """The chosen and the rejected answer, with these labels."""
    if row["chosen"] == row["rejected"]:
        raise BadRow(SAME_ANSWERS)
    prompt, *answers = _find_prompt(row, turn_columns)
    row = {**row, **dict(zip(PAIR_KEYS, answers, strict=True))}
    return [
        _answer(row, prompt, key, turn_columns, label, is_chat) for key, label in zip(PAIR_KEYS, labels, strict=True)
    ]


def _ranked_pairs(row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Every answer of a ranked list with every worse one. Rank 1 is the best, and so is the highest score."""
    kind = RANKS if RANKS in row else SCORES
    answers, scores = _read_scores(row, kind)
    pairs = []
    for (better, score), (worse, lower) in permutations(zip(answers, scores, strict=True), 2):
        if score > lower:
            pairs.append((better, worse))
    if not pairs:
        raise BadRow(WRONG_LABEL, f"{kind} says of no answer that it is better than another")
    # The same answer may stand there twice, and one may be empty: the pairs of all others are as good.
    return [(a, b) for a, b in pairs if a != b and not _is_empty(a) and not _is_empty(b)] or pairs[:1]


def _read_scores(row: Mapping[str, Any], kind: str) -> tuple[list[Any], list[float]]:
    """The answers of a ranked list with a number for each, the highest for the best; `kind`: which of the two it has.

    Raises:
        BadRow: they are not two lists of the same length, not too long, of which the second has numbers.
    """
    answers = row[RESPONSES]
    values = row.get(kind)
    if not isinstance(answers, list) or not isinstance(values, list) or len(answers) != len(values):
        raise BadRow(WRONG_TYPES, f"{RESPONSES} and {RANKS} (or {SCORES}) are not two lists of the same length")
    if len(answers) > MAX_RESPONSES:
        raise BadRow(WRONG_TYPES, f"{len(answers)} {RESPONSES}, over {MAX_RESPONSES}")
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in values):
        raise BadRow(WRONG_LABEL, f"{kind} has {values!r}, which are not all numbers")
    scores = [-value for value in values] if kind == RANKS else values
    return answers, scores


def read_margin(found: dict[str, Any], columns: Mapping[str, str]) -> float:
    """By how much the rewards of a row's answers are to differ, for the loss; 0 where the row does not say.

    Raises:
        BadRow: it is no number.
    """
    value = rename(found, columns).get(MARGIN)
    if value is None:
        return 0.0
    if type(value) not in (int, float) or not abs(value) <= MAX_MARGIN:
        raise BadRow(WRONG_LABEL, f"margin is {value!r}, which is no number up to {MAX_MARGIN:g}")
    return float(value)


def preference_columns(names: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """The columns of a table that preferences need; all of them if the table has no such columns."""
    keys = ("prompt", *PAIR_KEYS, *JUDGED_KEYS, RESPONSES, RANKS, SCORES, MARGIN, *MORE_KEYS[DataFormat.messages])
    wanted = {columns.get(key, key) for key in keys}
    wanted.update(PROMPT_NAMES if columns.get("prompt", "prompt") not in names else ())
    wanted |= layout_columns(names, ANSWERS, columns)
    return [name for name in names if name in wanted] or list(names)


def _find_prompt(row: Mapping[str, Any], turn_columns: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected answer of a pair, without the beginning that both answers share if it is the prompt.

    Some data sets have a prompt as text and, as answers, whole conversations or texts that begin with it. Answers that
    begin with the same turn of the assistant, such as a call of a tool, are no whole conversations.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    are_turns = isinstance(chosen, list) and isinstance(rejected, list)
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    if are_texts and isinstance(prompt, str) and chosen.startswith(prompt) and rejected.startswith(prompt):
        return prompt, chosen.removeprefix(prompt), rejected.removeprefix(prompt)
    if are_turns and isinstance(prompt, str) and chosen and rejected and chosen[0] == rejected[0]:
        is_whole = role_of(as_messages(chosen[:1], turn_columns)[0]) != "assistant"
        prompt = None if is_whole else prompt
    if prompt is not None:
        return prompt, chosen, rejected
    if are_turns:
        shared = num_common(chosen, rejected)
        return chosen[:shared], chosen[shared:], rejected[shared:]
    if are_texts:
        shared = num_common(chosen, rejected)
        start = begins_answer(chosen, shared)
        if start is not None:  # a transcript, of which one answer may begin with the other
            return chosen[:start], chosen[start:], rejected[start:]
        begins = len(chosen[:shared].rstrip())  # a space before a word is part of the word
        return chosen[:begins], chosen[begins:], rejected[begins:]
    return "", chosen, rejected


def _answer(
    row: Mapping[str, Any],
    prompt: Any,
    key: str,
    turn_columns: Mapping[str, str],
    label: bool | None,
    is_chat: bool,
) -> Answer:
    """A prompt with the answer under `key`, checked; `is_chat`: a conversation, also if both are text."""
    answer = row[key]
    for name, value in (("prompt", prompt), (key, answer)):
        if not isinstance(value, (str, list)):
            raise BadRow(WRONG_TYPES, f"{name} is {type_name(value)}, neither text nor a list of messages")
        refuse_turns_as_text(name, value)
    if _is_empty(answer):
        ends = "" if "prompt" in row else ": where the prompt ends can't be told, so write it in a column of its own"
        raise BadRow(EMPTY, f"{key} is empty{ends}")
    if isinstance(prompt, str) and isinstance(answer, str) and not is_chat:
        fields = {"prompt": prompt, "completion": answer, **{key: row.get(key) for key in NOT_TEXT}}
        return Answer(*check_row(fields, DataFormat.prompt_completion, {}), label)
    messages = {
        "messages": join_answer(prompt, answer, turn_columns),
        **{key: row.get(key) for key in MORE_KEYS[DataFormat.messages]},
    }
    return Answer(*check_row(messages, DataFormat.messages, {}), label)


def _is_empty(answer: Any) -> bool:
    return not (answer.strip() if isinstance(answer, str) else answer)


def _read_label(value: Any) -> bool:
    found = LABEL_VALUES.get(str(value).strip().lower()) if isinstance(value, (bool, int, float, str)) else None
    if found is None:
        raise BadRow(WRONG_LABEL, f"label is {value!r}, neither true nor false")
    return found
