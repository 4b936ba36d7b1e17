"""Guess data.columns for a row whose columns have other names. A guess is tried on the row before it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from qlora_fsdp.data.columns import COMMON_NAMES, TURN_KEYS
from qlora_fsdp.data.message import SYSTEM
from qlora_fsdp.data.row import EMPTY, SHAREGPT_ROLES, BadRow
from qlora_fsdp.data.turn_shapes import is_list_of_mappings, is_list_of_turns

Row = Mapping[str, Any]

# What data sets call more than what every row has, the commonest first.
CONTEXT_NAMES = ("input", "context", "passage")
SYSTEM_NAMES = (*SYSTEM, "system_prompt", "system_message")
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking", "complex_cot", "cot", "chain_of_thought", "rationale")
CHOSEN_NAMES = ("chosen", "chosen_response", "preferred", "accepted", "response_j")
REJECTED_NAMES = ("rejected", "rejected_response", "dispreferred", "response_k")


def first_working(guesses: Iterable[dict[str, str]], read: Callable[[dict[str, str]], object]) -> dict[str, str]:
    """The first guess of data.columns with which a row can be read; empty: there is none.

    Args:
        guesses: tried in this order.
        read: reads the row with these columns. Raises BadRow if it can't.
    """
    for columns in guesses:
        try:
            read(columns)
        except BadRow as bad:
            if bad.kind != EMPTY:  # another row has words there
                continue
        return columns
    return {}


def show_columns(columns: Mapping[str, str]) -> str:
    """The setting, as it is typed."""
    pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    return f"data.columns={{{pairs}}}"


def names_of(row: Row, names: Iterable[str]) -> list[str]:
    """The keys of a row that are among some names, whatever their case, in the order of the names."""
    by_name = {key.lower(): key for key in row}
    return [by_name[name] for name in names if name in by_name]


def guess_columns(row: Row) -> Iterator[dict[str, str]]:
    """Guesses for a row of a language model: those first that leave less out."""
    return filter(None, _guess_columns(row))


def guess_answers(row: Row, prompt_names: Iterable[str]) -> Iterator[dict[str, str]]:
    """Guesses for a row with answers to compare."""
    return filter(None, _guess_answers(row, prompt_names))


def _guess_columns(row: Row) -> Iterator[dict[str, str]]:
    for key in [*names_of(row, COMMON_NAMES["messages"]), *row]:
        yield from _guess_turns(key, row[key])
    answers = [key for key in names_of(row, (*COMMON_NAMES["completion"], "attempt")) if isinstance(row[key], str)]
    answers.sort(key=lambda key: -len(row[key]))  # a short one beside a long one is its last line
    for prompt in names_of(row, COMMON_NAMES["prompt"]):
        for answer in answers:
            if answer != prompt:
                yield from _guess_pair(row, prompt, answer)
    for text in names_of(row, COMMON_NAMES["text"]):
        yield _renamed({"text": text})


def _guess_pair(row: Row, prompt: str, answer: str) -> Iterator[dict[str, str]]:
    """Guesses for a row with this prompt and this answer: with its system prompt and thoughts, with its context."""
    pair = {"prompt": prompt, "completion": answer}
    more = {**find_system(row), **_first_text(row, "reasoning_content", THOUGHT_NAMES)}
    if more:
        yield {**more, **pair}
    for context in names_of(row, CONTEXT_NAMES):
        if context not in (prompt, answer):
            yield _renamed({"instruction": prompt, "input": context, "output": answer})
    yield _renamed(pair)


def _guess_answers(row: Row, prompt_names: Iterable[str]) -> Iterator[dict[str, str]]:
    chosen = names_of(row, CHOSEN_NAMES)
    rejected = names_of(row, REJECTED_NAMES)
    answers = {"chosen": chosen[0], "rejected": rejected[0]} if chosen and rejected else {}
    for prompt in names_of(row, ("prompt", *prompt_names)):
        yield {**find_system(row), **_renamed({"prompt": prompt, **answers})}
    yield _renamed(answers)


def find_system(row: Row) -> dict[str, str]:
    """data.columns for the system prompt of a row; empty: it has none."""
    return _first_text(row, "system", SYSTEM_NAMES)


def name_left_out(row: Row, columns: Mapping[str, str]) -> list[str]:
    """The columns with another answer, thoughts, or a context, of which a guess reads nothing."""
    names = (*COMMON_NAMES["completion"], "attempt", *THOUGHT_NAMES, "thinking_trajectories", *CONTEXT_NAMES)
    read = {*columns, *columns.values()}
    return [key for key in names_of(row, names) if key not in read and row[key] and isinstance(row[key], (str, list))]


def _guess_turns(key: str, value: Any) -> Iterator[dict[str, str]]:
    """Guesses for a column of turns, whose own keys may have other names too."""
    if is_list_of_turns(value):
        yield _renamed({"messages": key})
    elif is_list_of_mappings(value):
        found = _guess_keys(value)
        if found is not None:
            yield _renamed({"messages": key, **dict(zip(TURN_KEYS, found, strict=True))})


def _guess_keys(value: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The keys under which turns have their role and what is said, the longest text; None: they have no two such."""
    roles: list[str] = []  # keys under which every turn has a role
    lengths: dict[str, int] = {}  # of what is said, by the key under which all turns have texts
    for name in value[0]:
        texts = [turn[name] for turn in value if isinstance(turn.get(name), str)]
        if len(texts) < len(value):
            continue
        if SHAREGPT_ROLES.keys() >= {text.lower() for text in texts}:
            roles.append(name)
        else:
            lengths[name] = len("".join(texts))
    if not roles or not lengths:
        return None
    return roles[0], max(lengths, key=lambda name: lengths[name])


def _first_text(row: Row, ours: str, names: Iterable[str]) -> dict[str, str]:
    """The first column among some names that holds text, as one of data.columns."""
    found = [key for key in names_of(row, names) if isinstance(row[key], str) and row[key].strip()]
    return {ours: found[0]} if found else {}


def _renamed(columns: dict[str, str]) -> dict[str, str]:
    """What is called otherwise in the data."""
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}
