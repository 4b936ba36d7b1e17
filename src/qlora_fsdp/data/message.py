"""What a message of a conversation says of itself: its role, what it calls, and whether it is trained on."""

from __future__ import annotations

from typing import Any

SYSTEM = ("system", "developer")  # roles

# Keys of a message that say whether it is trained on: the first is ours, `training` Axolotl's and `loss` ms-swift's.
TRAIN_KEYS = ("train", "weight", "training", "loss")
PART_KEY = "train_detail"  # of Axolotl's: which characters of a message are trained on


def role_of(turn: Any) -> Any:
    """The role of a message; None: it has none."""
    return turn.get("role") if isinstance(turn, dict) else None


def is_trained(message: dict[str, Any]) -> bool:
    """Whether a message of the assistant is trained on: it is, unless it says `train: false`, `weight: 0` or alike."""
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
