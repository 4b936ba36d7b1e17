"""Stage 2, row: a parsed row → a dict of a known form, or a `BadRow` that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import MORE_KEYS, NOT_TEXT, REQUIRED_KEYS, TURN_KEYS, explain_keys, rename, show_keys

EMPTY = "empty"
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON"
WRONG_KEYS = "wrong keys"
WRONG_TYPES = "wrong types"
REFUSED = "refused by the chat template"
NO_TARGET = "no target token"
WRONG_LABEL = "wrong label"
SAME_ANSWERS = "chosen and rejected are the same"
TOO_LONG = "longer than training.max_length"

TURN_HINT = "; data.columns={role: NAME, content: NAME} says which these are"

SYSTEM = ("system", "developer")  # roles

TRAIN_KEYS = ("train", "weight")  # keys of a message that say whether it is trained on

# The roles of ShareGPT's turns, {"from": ..., "value": ...}, by the names that data sets give them.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


class BadRow(Exception):
    """A row that can't be used.

    Attributes:
        kind: one of the kinds above, by which bad rows are counted.
        detail: what is wrong with this row.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def check_row(
    found: dict[str, Any], data_format: DataFormat, columns: Mapping[str, str]
) -> tuple[DataFormat, dict[str, Any]]:
    """Checks the keys and types of a parsed row that its form needs. Other keys are ignored.

    Args:
        found: the row, as `parse_row` gives it.
        data_format: the form of the rows; `auto`: it is told by their keys.
        columns: the names that the data has for the keys of the form, where they differ (data.columns).

    Returns:
        The form and the row. ShareGPT's rows become messages, so the form is never `sharegpt`, and never `auto`. So do
        a prompt and a completion of which one is a list of messages.

    Raises:
        BadRow: the row can't be used.
    """
    row = rename(found, columns)
    form = _detect(row, found, columns) if data_format is DataFormat.auto else data_format
    missing = [key for key in REQUIRED_KEYS[form] if key not in row]
    if missing:
        raise BadRow(WRONG_KEYS, explain_keys(found, missing, columns))
    if form is DataFormat.sharegpt:
        turns = _from_sharegpt(_rename_keys(row["conversations"], columns))
        form, row = DataFormat.messages, {**row, "messages": turns}
    elif form is DataFormat.messages:
        row = {**row, "messages": _rename_turns(row["messages"], columns)}
    elif form is DataFormat.prompt_completion and any(isinstance(row[key], list) for key in REQUIRED_KEYS[form]):
        turns = join_answer(row["prompt"], row["completion"], columns)
        form, row = DataFormat.messages, {**row, "messages": turns}
    for key in NOT_TEXT:
        if key in MORE_KEYS.get(form, ()) and row.get(key):
            raise BadRow(WRONG_KEYS, f"the row has {key}, and training is on text alone")
    if form is DataFormat.messages:
        _check_messages(row["messages"])
        messages = [{**message, "content": _join_parts(message.get("content"))} for message in row["messages"]]
        row = {**row, "messages": messages, "tools": _read_tools(row.get("tools"))}
        system = row.get("system")
        return form, add_system_prompt(row, system) if isinstance(system, str) and system else row
    for key in REQUIRED_KEYS[form]:
        if not isinstance(row[key], str):
            raise BadRow(WRONG_TYPES, f"{key} is {type_name(row[key])}, not text")
    answer = REQUIRED_KEYS[form][-1]
    if not row[answer].strip():
        raise BadRow(EMPTY, f"{answer} is empty")
    if form is DataFormat.instruction:
        if not isinstance(row.get("input"), (str, type(None))):
            raise BadRow(WRONG_TYPES, f"input is {type_name(row['input'])}, not text")
        if row.get("history"):
            raise BadRow(WRONG_KEYS, "history is not empty, and Alpaca's prompt has no place for it; write messages")
    return form, row


def _detect(row: dict[str, Any], found: dict[str, Any], columns: Mapping[str, str]) -> DataFormat:
    """The form of a row, of which `found` is as it is in the data.

    A table that was joined of several has the columns of all their forms, null where a row is of another one.
    """
    for there in ([key for key, value in row.items() if value is not None], list(row)):
        for form, keys in REQUIRED_KEYS.items():
            if all(key in there for key in keys):
                return form
    raise BadRow(WRONG_KEYS, explain_keys(found, (), columns))


def _rename_keys(turns: Any, columns: Mapping[str, str]) -> Any:
    """The turns of a row with the keys of messages, where data.columns says how these are called."""
    names = {key: columns[key] for key in TURN_KEYS if key in columns}
    if not isinstance(turns, list) or not names:
        return turns
    return [rename(turn, names) if isinstance(turn, dict) else turn for turn in turns]


def _rename_turns(turns: Any, columns: Mapping[str, str]) -> Any:
    """The turns of a row with the keys and the roles of messages, if the data has others."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    if not any(key in columns for key in TURN_KEYS):
        has_other_names = any("from" in turn for turn in turns) and not any("role" in turn for turn in turns)
        return _from_sharegpt(turns) if has_other_names else turns
    messages = []
    for number, turn in enumerate(_rename_keys(turns, columns), start=1):
        name = turn.get("role")
        if name == "function_call" and "tool_calls" not in turn:
            turn = {**turn, "tool_calls": _read_calls(turn.get("content"), number), "content": None}
        messages.append({**turn, "role": SHAREGPT_ROLES.get(name, name)} if isinstance(name, str) else turn)
    return messages


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow(WRONG_TYPES, "conversations is not a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        name, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise BadRow(WRONG_KEYS, f"turn {number} is from {name!r}, none of {', '.join(SHAREGPT_ROLES)}")
        more = {key: turn[key] for key in TRAIN_KEYS if key in turn}
        said = {"tool_calls": _read_calls(value, number)} if name == "function_call" else {"content": value}
        messages.append({"role": role, **said, **more})
    return messages


def _read_calls(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's calls of tools, a JSON object or a list of objects, in the form that messages have."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow(NOT_JSON, f"turn {number} is a function_call that is no JSON: {error}") from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(WRONG_TYPES, f"turn {number} is a function_call without a name")
    return [{"type": "function", "function": call} for call in calls]


def join_answer(prompt: Any, answer: Any, columns: Mapping[str, str]) -> list[Any]:
    """A prompt and its answer, each text or turns, as messages of which the prompt's are not trained on.

    Turns may have the names of ShareGPT, or those of data.columns. An answer that is a whole conversation begins with
    the prompt, which is written once.

    Raises:
        BadRow: one of them is neither.
    """
    for value in (prompt, answer):
        if not isinstance(value, (str, list)):
            raise BadRow(WRONG_TYPES, f"{type_name(value)} beside a list of messages is neither text nor such a list")
    prompt, answer = _rename_turns(prompt, columns), _rename_turns(answer, columns)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if [_without_nulls(turn) for turn in answer[: len(prompt)]] == [_without_nulls(turn) for turn in prompt]:
        answer = answer[len(prompt) :]
    return [*(turn | {TRAIN_KEYS[0]: False} if isinstance(turn, dict) else turn for turn in prompt), *answer]


def _without_nulls(turn: Any) -> Any:
    """A turn without the fields that only turns of another column have."""
    return {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else turn


def add_system_prompt(row: dict[str, Any], text: str) -> dict[str, Any]:
    """A conversation that begins with a system message: its own, or else one that says `text`."""
    has_one = row["messages"][0]["role"] in SYSTEM
    return row if has_one else {**row, "messages": [{"role": "system", "content": text}, *row["messages"]]}


def is_trained(message: dict[str, Any]) -> bool:
    """Whether a message of the assistant is trained on: it is, unless it says `train: false` or `weight: 0`."""
    return all(message.get(key) is None or bool(message[key]) for key in TRAIN_KEYS)


def function_of(call: Any) -> dict[str, Any] | None:
    """The function of a call or of a tool, which has it under `function` or is it itself; None: it has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else None


def called_name(message: dict[str, Any]) -> str | None:
    """The name of the function that a message calls first; None: it calls none that has a name."""
    calls = message.get("tool_calls")
    function = function_of(calls[0]) if isinstance(calls, list) and calls else None
    name = None if function is None else function.get("name")
    return name if isinstance(name, str) and name else None


def as_template_sees(message: dict[str, Any]) -> dict[str, Any]:
    """A message without fields that are null, as templates test whether a field is there, and without `train`."""
    return {key: value for key, value in message.items() if value is not None and key not in TRAIN_KEYS}


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise BadRow(WRONG_TYPES, f"messages is {type_name(messages)}, not a list")
    if not messages:
        raise BadRow(EMPTY, "messages is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(WRONG_TYPES, f"message {number} is {type_name(message)}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise BadRow(WRONG_KEYS, f"message {number} has no role (keys: {show_keys(message)}{TURN_HINT})")
        if message.get("function_call"):
            raise BadRow(WRONG_KEYS, f"message {number} has function_call, OpenAI's older form; write tool_calls")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            hint = "" if "content" in message else TURN_HINT
            raise BadRow(WRONG_KEYS, f"message {number} has no content (keys: {show_keys(message)}{hint})")
        if not isinstance(content, (str, list, type(None))):
            raise BadRow(WRONG_TYPES, f"the content of message {number} is {type_name(content)}, not text")
        for key in TRAIN_KEYS:
            if message.get(key, True) not in (True, False, None):  # 0 and 1 are among these
                raise BadRow(WRONG_TYPES, f"{key} of message {number} is {message[key]!r}, neither 0 nor 1")


def _join_parts(content: Any) -> Any:
    """The content of a message. Parts that are all text are joined, because most templates know text alone."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if is_text else content


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a conversation: a list of JSON schemas. Data sets with fixed columns have the list as text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRow(NOT_JSON, f"tools is text that is no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadRow(WRONG_TYPES, f"tools is {type_name(tools)}, not a list of JSON schemas")
    for number, tool in enumerate(tools, start=1):
        function = function_of(tool)
        if function is None or not isinstance(function.get("name"), str):
            raise BadRow(WRONG_TYPES, f"tool {number} is not an object with a name, or with a function that has one")
    return tools


def type_name(value: Any) -> str:
    """The type of a value, for messages."""
    return "null" if value is None else type(value).__name__
