"""Messages of ranks in the store where they met. Anybody on the host may write there, so nothing of it is trusted.

A message is JSON with a signature, for which one needs the run's secret (common/run_key.py). One that has no valid
signature, is longer than any honest one, or has other fields than it should, counts as not being there.
"""

from __future__ import annotations

import hmac
import json
from typing import Any, TypeVar, get_type_hints

Message = TypeVar("Message")

MAX_BYTES = 2**18
MAX_TEXT = 2**15  # characters of one text in it


def seal(message: Any, key: str) -> str:
    """Returns a message as it is written to the store.

    Args:
        message: an instance of a dataclass with fields of type int, bool, str or list[int].
        key: the run's secret.
    """
    values = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in vars(message).items()}
    text = json.dumps(values)
    return f"{_sign(text, key)} {text}"


def unseal(kind: type[Message], stored: bytes, key: str) -> Message | None:
    """Returns the message in what was read from the store; None where that is none of a rank of this run."""
    try:
        signature, _, text = stored.decode().partition(" ")
        if len(stored) > MAX_BYTES or not hmac.compare_digest(signature, _sign(text, key)):
            return None
        values = json.loads(text)
        if any(not _is_of_type(values[field], hint) for field, hint in get_type_hints(kind).items()):
            return None
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _sign(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def _is_of_type(value: Any, hint: Any) -> bool:
    if hint == list[int]:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) is hint
