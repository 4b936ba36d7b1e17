"""Layouts in which rows are published, in one table: how each is told from others, and the row of a known form it is.

`check_row` knows five forms. A row of another layout is rewritten here before it gets there, so that nothing behind
this module knows of layouts. A layout is told by its keys and by how their values are built, never by whose data it is.
What can't be read without a decision of the user's is asked for: see `ASKED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import COMMON_NAMES, REQUIRED_KEYS, form_columns, rename
from qlora_fsdp.data.row import WRONG_KEYS, WRONG_LABEL, BadRow, parse_json_text
from qlora_fsdp.data.turn_shapes import (
    as_function,
    find_objects,
    is_list_of_turns,
    is_transcript,
    read_texts,
    read_tools,
    read_transcript,
    read_turns,
)

Row = dict[str, Any]

TURNS = ("messages", "conversations")  # keys of conversations, whose turns may have other shapes
# Keys of which one, if data.columns names it, makes a conversation of a prompt and a completion that are text.
OF_CHATS = ("system", "reasoning_content")
LABEL_VALUES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Layout:
    """A layout of rows.

    Attributes:
        about: what it is, for messages.
        needs: the keys by which it is known.
        more: other keys that it may have.
        fits: whether the values of a row with these keys are built as in this layout.
        read: the row of a known form. Raises BadRow if it can't be read.
    """

    about: str
    needs: tuple[str, ...]
    more: tuple[str, ...]
    fits: Callable[[Row], bool]
    read: Callable[[Row], Row]

    def is_of(self, row: Row) -> bool:
        """Whether a row has this layout."""
        return all(row.get(key) is not None for key in self.needs) and self.fits(row)


def read_layout(found: Row, data_format: DataFormat, columns: Mapping[str, str]) -> tuple[Row, DataFormat]:
    """A row of a language model as one of a known form.

    Args:
        found: the row, as `parse_row` gives it.
        data_format: the form of the rows; `auto`: it is told by their keys.
        columns: data.columns.

    Returns:
        The row under the names of this project, and its form, which may still be `auto`.

    Raises:
        BadRow: what is to be done with it is the user's to say, or it can't be read.
    """
    row = rename(found, columns)
    if data_format is DataFormat.auto:
        for layout in ASKED:
            # Whoever says in data.columns which is the answer was asked already, and the log names the label.
            if layout.is_of(row) and not any(key in columns for key in layout.needs):
                row = layout.read(row)
        if not any(all(key in row for key in keys) for keys in REQUIRED_KEYS.values()):
            row = next((layout.read(row) for layout in CONVERSATIONS if layout.is_of(row)), row)
    for key in TURNS:
        value = row.get(key)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = parse_json_text(f"{key} is text", value)
        if isinstance(value, list):
            row = {**row, key: read_texts(read_turns(value))}
    for key in REQUIRED_KEYS[DataFormat.prompt_completion]:
        if isinstance(row.get(key), list):
            row = {**row, key: read_turns(row[key])}
    if row.get("tools"):
        row = {**row, "tools": read_tools(_parse_tools(row["tools"]))}
    if data_format is DataFormat.messages:
        return _as_conversation(row), data_format
    if data_format in (DataFormat.auto, DataFormat.prompt_completion) and _asks_for_chat(row, columns):
        return _make_chat(row), DataFormat.messages
    return row, data_format


def read_answers_layout(found: Row, columns: Mapping[str, str]) -> Row:
    """A row with answers to compare as one with chosen and rejected, or with responses and their ranks or scores.

    Raises:
        BadRow: it can't be read.
    """
    row = rename(found, columns)
    row = next((layout.read(row) for layout in ANSWERS if layout.is_of(row)), row)
    return {
        key: read_turns(value) if key in ("prompt", "chosen", "rejected", "completion") else value
        for key, value in row.items()
    }


def layout_columns(names: Sequence[str], layouts: Sequence[Layout], columns: Mapping[str, str]) -> set[str]:
    """The columns that layouts need, of those whose columns a table has."""
    usable = [layout for layout in layouts if not any(key in columns for key in layout.needs)]
    found = [layout for layout in usable if all(key in names for key in layout.needs)]
    return {columns.get(key, key) for layout in found for key in (*layout.needs, *layout.more)}


def text_columns(names: Sequence[str], data_format: DataFormat, columns: Mapping[str, str]) -> list[str]:
    """The columns of a table that rows of a language model need; all of them if the table has no such columns."""
    wanted = form_columns(names, data_format, columns)
    if data_format is DataFormat.auto:
        wanted |= layout_columns(names, ASKED if wanted else CONVERSATIONS, columns)
    return [name for name in names if name in wanted or not wanted]


def is_judgement(value: Any) -> bool:
    """Whether a value says that an answer is good, or that it is not."""
    return isinstance(value, (bool, int, float, str)) and str(value).strip().lower() in LABEL_VALUES


def _parse_tools(tools: Any) -> Any:
    """Tools as JSON text, parsed. Other text stays: it is refused where it belongs to a conversation (`check_row`)."""
    with suppress(BadRow):
        return parse_json_text("tools is text", tools)
    return tools


def _asks_for_chat(row: Row, columns: Mapping[str, str]) -> bool:
    keys = REQUIRED_KEYS[DataFormat.prompt_completion]
    return any(key in columns for key in OF_CHATS) and all(isinstance(row.get(key), str) for key in keys)


def _as_conversation(row: Row) -> Row:
    """A row that is wanted as a conversation: one of two texts, or of Alpaca's, becomes a question and its answer."""
    if any(key in row for key in TURNS):
        return row
    if _has_texts(row, DataFormat.prompt_completion):
        return _make_chat(row)
    return _from_alpaca(row) if _has_texts(row, DataFormat.instruction) else row


def _has_texts(row: Row, form: DataFormat) -> bool:
    return all(isinstance(row.get(key), str) for key in REQUIRED_KEYS[form])


def _from_alpaca(row: Row) -> Row:
    """The conversation of an instruction with its input, and an output; a history of pairs stands before them."""
    parts = [row["instruction"], row.get("input")]
    prompt = "\n".join(part for part in parts if isinstance(part, str) and part)
    made = _make_chat({**row, "prompt": prompt, "completion": row["output"]})
    history = row.get("history")
    if isinstance(history, list):
        made["messages"] = [*read_turns(history), *made["messages"]]
    return made


def _make_chat(row: Row) -> Row:
    """The conversation of a prompt and a completion. Its system message is that of the row."""
    answer = {"role": "assistant", "content": row["completion"], "reasoning_content": row.get("reasoning_content")}
    return {**row, "messages": [{"role": "user", "content": row["prompt"]}, answer]}


# --- Rows whose keys are those of a known form, and that are something else. ---


def _ask_about_label(row: Row) -> Row:
    form = "messages" if "messages" in row else "prompt_completion"
    raise BadRow(
        WRONG_KEYS,
        f"label is {row['label']!r}: does it say whether the answer is good? Then set task=preference "
        f"preference.loss=kto; to train on all answers, good or bad, set data.format={form}",
    )


def _refuse_tree(row: Row) -> Row:
    raise BadRow(
        WRONG_KEYS,
        "one message of a tree (parent_id), and no conversation. Join the messages to conversations first, by the"
        ' script under "Trees" in docs/data.md; to train on every message as plain text, set data.format=text',
    )


ASKED = (
    Layout(
        "an answer that was judged",
        ("completion", "label"),
        (),
        lambda row: is_judgement(row["label"]),
        _ask_about_label,
    ),
    Layout(
        "a conversation that was judged",
        ("messages", "label"),
        (),
        lambda row: is_judgement(row["label"]),
        _ask_about_label,
    ),
    Layout(
        "a message of a tree",
        ("text", "role", "message_id"),
        ("parent_id",),
        lambda row: "parent_id" in row,
        _refuse_tree,
    ),
)


# --- Conversations. ---


def _has_calls(row: Row) -> bool:
    try:
        calls = parse_json_text("answers is text", row["answers"])
    except BadRow:
        return False
    return isinstance(row["query"], str) and isinstance(calls, list) and all(map(_is_call, calls))


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def _read_calls(row: Row) -> Row:
    calls = [{"type": "function", "function": call} for call in parse_json_text("answers is text", row["answers"])]
    tools = parse_json_text("tools is text", row["tools"])
    if isinstance(tools, list):
        tools = [as_function(tool) for tool in tools]
    messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return {**row, "messages": messages, "tools": tools}


def _read_chat_text(row: Row) -> Row:
    """A transcript, with the functions that its system prompt lists as tools."""
    messages = read_transcript(row["chat"])
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        text, tools = find_objects(system.strip().removeprefix("SYSTEM:").strip())
        has_names = all("name" in tool for tool in tools)
        if tools and has_names:
            return {**row, "messages": messages, "system": text, "tools": [as_function(tool) for tool in tools]}
        row = {**row, "system": system.strip().removeprefix("SYSTEM:").strip()}
    return {**row, "messages": messages}


def _read_contents(row: Row) -> Row:
    """Google's: the system prompt is an object with parts."""
    system = row.get("systemInstruction")
    parts = system.get("parts") if isinstance(system, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        system = "".join(str(part.get("text", "")) for part in parts)
    return {**row, "messages": row["contents"], "system": system}


def _turns_called(name: str) -> Layout:
    return Layout(
        "a conversation",
        (name,),
        ("system", "tools"),
        lambda row: is_list_of_turns(row[name]),
        lambda row: {**row, "messages": row[name]},
    )


CONVERSATIONS = (
    Layout("a question with calls of tools", ("query", "tools", "answers"), (), _has_calls, _read_calls),
    Layout("a transcript", ("chat",), ("system",), lambda row: is_transcript(row["chat"]), _read_chat_text),
    Layout(
        "turns with parts",
        ("contents",),
        ("systemInstruction", "tools"),
        lambda row: is_list_of_turns(row["contents"]),
        _read_contents,
    ),
    *(_turns_called(name) for name in COMMON_NAMES["messages"] if name not in TURNS),
)


# --- Answers to compare. ---


def _is_request(row: Row) -> bool:
    return isinstance(row["input"], dict) and isinstance(row["input"].get("messages"), list)


def _read_request(row: Row) -> Row:
    request = row["input"]
    return {
        "prompt": request["messages"],
        "tools": request.get("tools"),
        "chosen": row["preferred_output"],
        "rejected": row["non_preferred_output"],
    }


# What the objects of a ranked list call an answer, its rank (1 is the best) and its score (the highest is best).
ANSWER_NAMES = ("answer", "response", "text", "content", "output", "completion")
RANK_NAMES = ("rank", "ranking")
SCORE_NAMES = ("score", "overall_score", "rating", "pm_score", "reward")


def _ranked(name: str) -> Layout:
    return Layout(
        "ranked answers",
        (name,),
        (),
        lambda row: _find_ranking(row[name]) is not None,
        lambda row: _read_ranking(row, name),
    )


def _find_ranking(value: Any) -> tuple[str, str] | None:
    """The keys of the answer and of its rank or score in the objects of a ranked list; None: it is none."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, dict) for item in value):
        return None
    keys = set(value[0]).intersection(*value)
    answer = next((key for key in ANSWER_NAMES if key in keys), None)
    order = next((key for key in (*RANK_NAMES, *SCORE_NAMES) if key in keys), None)
    return None if answer is None or order is None else (answer, order)


def _read_ranking(row: Row, name: str) -> Row:
    found = _find_ranking(row[name])
    assert found is not None
    answer, order = found
    kind = "ranks" if order in RANK_NAMES else "scores"
    kept = {key: value for key, value in row.items() if key != name}
    return {**kept, "responses": [item[answer] for item in row[name]], kind: [item[order] for item in row[name]]}


def _compared(first: str, second: str, verdict: str, is_first: Mapping[str, bool], prompt: str = "prompt") -> Layout:
    """Two answers, and a value that says which is better: `is_first` has those that do. Others say neither."""

    def read(row: Row) -> Row:
        value = str(row[verdict]).strip().lower()
        better = is_first.get(value)
        if better is None:
            raise BadRow(WRONG_LABEL, f"{verdict} is {row[verdict]!r}, which says of neither answer that it is better")
        chosen, rejected = (first, second) if better else (second, first)
        kept = {key: value for key, value in row.items() if key not in (first, second, verdict)}
        own = {} if row.get(prompt) is None else {"prompt": row[prompt]}
        return {**kept, **own, "chosen": row[chosen], "rejected": row[rejected]}

    return Layout("two answers of which one is better", (first, second, verdict), (prompt,), lambda row: True, read)


_ONE_IS_FIRST = {"1": True, "0": False, "1.0": True, "0.0": False, "true": True, "false": False}
_ZERO_IS_FIRST = {value: not is_first for value, is_first in _ONE_IS_FIRST.items()}
_NEGATIVE_IS_FIRST = {str(sign * size): sign < 0 for sign in (-1, 1) for size in (1, 2, 3)}
_MODEL_IS_FIRST = {"model_a": True, "model_b": False, "a": True, "b": False}

ANSWERS = (
    Layout(
        "a request with two outputs",
        ("input", "preferred_output", "non_preferred_output"),
        (),
        _is_request,
        _read_request,
    ),
    *(_ranked(name) for name in ("answers", "completions", "responses", "outputs", "candidates")),
    _compared("human_ref_A", "human_ref_B", "labels", _ONE_IS_FIRST, prompt="history"),
    _compared("conversation_a", "conversation_b", "winner", _MODEL_IS_FIRST),
    _compared("response_a", "response_b", "winner", _MODEL_IS_FIRST),
    _compared("response_0", "response_1", "better_response_id", _ZERO_IS_FIRST),
    _compared("response_1", "response_2", "preference_strength", _NEGATIVE_IS_FIRST),
    _compared("response1", "response2", "overall_preference", _NEGATIVE_IS_FIRST, prompt="context"),
)
