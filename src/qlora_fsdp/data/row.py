"""Stage 2, row: the bytes of a row → a dict of a known form, or a `BadRow` that says what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from qlora_fsdp.config.schema import DataFormat
from qlora_fsdp.data.columns import MORE_KEYS, NOT_TEXT, REQUIRED_KEYS, TURN_KEYS, rename, show_keys
from qlora_fsdp.data.message import PART_KEY, SYSTEM, TRAIN_KEYS, as_template_sees, function_of, role_of

EMPTY = "empty"
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON"
WRONG_KEYS = "wrong keys"
WRONG_TYPES = "wrong types"
REFUSED = "refused by the chat template"
NO_TARGET = "no target token"
WRONG_LABEL = "wrong label"
SAME_ANSWERS = "chosen and rejected are the same"
SPLIT = "longer than training.max_length; all of it is used"
TOO_LONG = "longer than training.max_length"

TURN_HINT = "; data.columns={role: NAME, content: NAME} says which these are"

# Turns as a table of texts has them: JSON, or what Python prints.
TURNS_AS_TEXT = re.compile(
    r"""\s*\[\s*\{\s*(?=['"](?:role|from|content|value)['"]\s*:)"""
    r""".*?['"](?:role|from)['"]\s*:\s*['"](?:user|assistant|system|human|gpt)['"]""",
    re.DOTALL,
)

# The roles of ShareGPT's turns, {"from": ..., "value": ...}, by the names that data sets give them.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bard", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

# What Excel writes as CSV in Western countries.
CONVERT = "if the file is Windows-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"


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


def parse_json_text(about: str, value: Any) -> Any:
    """What a value says that a column has as JSON text, as tables of texts do; a value that is no text, as it is.

    Blank text is None.

    Args:
        about: what it is, for the error, such as "tools is text".
        value: as the row has it.

    Raises:
        BadRow: it is text and no JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(NOT_JSON, f"{about} that is no JSON: {error}; json.dumps writes it") from error


def check_row(row: dict[str, Any], form: DataFormat, columns: Mapping[str, str]) -> tuple[DataFormat, dict[str, Any]]:
    """Checks the keys and types that the form of a row needs. Other keys are ignored.

    Args:
        row: it has the keys of its form, under the names of this project.
        form: one of REQUIRED_KEYS.
        columns: the names that the data has for the keys of turns (data.columns).

    Returns:
        The form and the row. ShareGPT's rows become messages, so the form is never `sharegpt`. So do a prompt and a
        completion of which one is a list of messages.

    Raises:
        BadRow: the row can't be used.
    """
    if form is DataFormat.prompt_completion:
        refuse_turns_as_text("prompt", row["prompt"])
    if form is DataFormat.sharegpt:
        turns = _from_sharegpt(_rename_keys(row["conversations"], columns))
        form, row = DataFormat.messages, {**row, "messages": turns}
    elif form is DataFormat.messages:
        row = {**row, "messages": as_messages(row["messages"], columns)}
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


def _rename_keys(turns: Any, columns: Mapping[str, str]) -> Any:
    """The turns of a row with the keys of messages, where data.columns says how these are called."""
    names = {key: columns[key] for key in TURN_KEYS if key in columns}
    if not isinstance(turns, list) or not names:
        return turns
    return [rename(turn, names) if isinstance(turn, dict) else turn for turn in turns]


def as_messages(turns: Any, columns: Mapping[str, str]) -> Any:
    """The turns of a row with the keys and the roles of messages, if the data has others."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    if any(key in columns for key in TURN_KEYS):
        renamed = _rename_keys(turns, columns)
        return [_with_known_role(turn, number) for number, turn in enumerate(renamed, start=1)]
    keys = set().union(*turns)
    return _from_sharegpt(turns) if "from" in keys and "role" not in keys else turns


def _with_known_role(turn: dict[str, Any], number: int) -> dict[str, Any]:
    """A turn whose role is called as in messages, whatever it is in ShareGPT's; what it calls is read from its text."""
    role = turn.get("role")
    if not isinstance(role, str):
        return turn
    if role == "function_call" and "tool_calls" not in turn:
        turn = {**turn, "tool_calls": _read_calls(turn.get("content"), number), "content": None}
    return {**turn, "role": SHAREGPT_ROLES.get(role, role)}


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow(WRONG_TYPES, "conversations is not a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        name, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise BadRow(WRONG_KEYS, f"turn {number} is from {name!r}, none of {', '.join(SHAREGPT_ROLES)}")
        more = {key: turn[key] for key in (*TRAIN_KEYS, PART_KEY) if key in turn}
        said = {"tool_calls": _read_calls(value, number)} if name == "function_call" else {"content": value}
        messages.append({"role": role, **said, **more})
    return messages


def _read_calls(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's calls of tools, a JSON object or a list of objects, in the form that messages have."""
    found = parse_json_text(f"turn {number} is a function_call", value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(WRONG_TYPES, f"turn {number} is a function_call without a name")
    return [{"type": "function", "function": call} for call in calls]


def join_answer(prompt: Any, answer: Any, columns: Mapping[str, str]) -> list[Any]:
    """A prompt and its answer, each text or turns, as messages of which the prompt's are not trained on.

    Turns may have the names of ShareGPT, or those of data.columns. An answer that is a whole conversation begins with
    the prompt, which is written once; one of the two may lack the system message.

    Raises:
        BadRow: one of them is neither, or the answer is a conversation of which the prompt is not the beginning.
    """
    for value in (prompt, answer):
        if not isinstance(value, (str, list)):
            raise BadRow(WRONG_TYPES, f"{type_name(value)} beside a list of messages is neither text nor such a list")
    prompt, answer = as_messages(prompt, columns), as_messages(answer, columns)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    (system, asked), (own_system, said) = _split_system(prompt), _split_system(answer)
    is_whole = [_as_said(turn) for turn in said[: len(asked)]] == [_as_said(turn) for turn in asked]
    if is_whole and (not system or not own_system or _as_said(system[0]) == _as_said(own_system[0])):
        prompt, answer = [*(system or own_system), *asked], said[len(asked) :]
    elif asked and said and role_of(asked[-1]) == role_of(said[0]) == "user":
        raise BadRow(WRONG_KEYS, "the answer is a conversation that does not begin with the prompt")
    return [*(turn | {TRAIN_KEYS[0]: False} if isinstance(turn, dict) else turn for turn in prompt), *answer]


def _split_system(turns: list[Any]) -> tuple[list[Any], list[Any]]:
    """The system message that turns begin with, if they do, and the others."""
    begins = 1 if turns and role_of(turns[0]) in SYSTEM else 0
    return turns[:begins], turns[begins:]


def _as_said(turn: Any) -> Any:
    """A turn without what may differ where two columns have the same one: nulls, parts, outer space and the like."""
    if not isinstance(turn, dict):
        return turn
    content = _join_parts(turn.get("content"))
    return as_template_sees({**turn, "content": content.strip() if isinstance(content, str) else content})


def holds_turns(value: Any) -> bool:
    """Whether a value is text that is a list of messages."""
    return isinstance(value, str) and TURNS_AS_TEXT.match(value) is not None


def refuse_turns_as_text(name: str, value: Any) -> None:
    """See that a text is no list of messages, which would be trained on as it is written.

    Raises:
        BadRow: it is one.
    """
    if holds_turns(value):
        raise BadRow(WRONG_TYPES, f"{name} is text that holds a list of messages; write the list itself")


def add_system_prompt(row: dict[str, Any], text: str) -> dict[str, Any]:
    """A conversation that begins with a system message: its own, or else one that says `text`."""
    has_one = row["messages"][0]["role"] in SYSTEM
    return row if has_one else {**row, "messages": [{"role": "system", "content": text}, *row["messages"]]}


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
        if message.get(PART_KEY):
            raise BadRow(WRONG_KEYS, f"message {number} has {PART_KEY}, and a message is trained on as a whole or not")


def _join_parts(content: Any) -> Any:
    """The content of a message. Parts that are all text are joined, because most templates know text alone."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if is_text else content


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a conversation: a list of JSON schemas. Data sets with fixed columns have the list as text."""
    tools = parse_json_text("tools is text", tools)
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


def parse_row(raw: bytes) -> dict[str, Any]:
    """Parses a row, whatever its keys.

    Raises:
        BadRow: the row is empty, not UTF-8 or no JSON object, or an object in it has a key twice.
    """
    if not raw.strip():
        raise BadRow(EMPTY)
    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=_read_object)
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the row is 0x{raw[error.start]:02x}"
        raise BadRow(NOT_UTF8, f"{place}; {CONVERT}") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(NOT_JSON, str(error)) from error
    check_unicode(raw, row)
    if not isinstance(row, dict):
        raise BadRow(
            WRONG_KEYS, "not an object of named fields, or a CSV line with more or fewer cells than the header"
        )
    return row


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. One that has a key twice is refused, because which value counts is anybody's guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(WRONG_KEYS, f"an object has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def check_unicode(raw: bytes, row: Any) -> None:
    """Refuses half of a character beyond U+FFFF (a lone surrogate). JSON's escapes can write it; no tokenizer takes it.

    Raises:
        BadRow: `row`, which was parsed from `raw`, has one.
    """
    if b"\\u" in raw:  # valid UTF-8 can write it in no other way, so other rows need not be written out
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise BadRow(NOT_UTF8, f"{half} is half of a character, without its other half") from error
