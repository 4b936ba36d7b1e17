"""Another project's settings while they are converted, and what comes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXTS = ("name", "path", "dir", "model", "revision", "dataset", "template", "project", "prompt", "field")  # in names
NOT_KNOWN = "not known here, and left out"


@dataclass
class TheirSettings:
    """The settings of a file, of which each is taken once.

    Attributes:
        values: the file's, of which those that were not taken yet are left.
        gpus: GPUs that the run had there: batch sizes are of each.
        settings: what comes of them, by our keys.
        remarks: beside these, by our keys: what a reader has to know of the value.
        left_out: what has no counterpart: name, value and reason.
    """

    values: dict[str, Any]
    gpus: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = {name: _read_quoted(name, value) for name, value in self.values.items()}

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a setting of theirs, which counts as dealt with; `default` where it is missing or null."""
        value = self.values.pop(name, None)
        return default if value is None else value

    def put(self, key: str, value: Any, remark: str = "") -> None:
        """Sets one of ours."""
        self.settings[key] = value
        if remark:
            self.remarks[key] = remark

    def leave_out(self, name: str, value: Any, reason: str) -> None:
        """Says why a setting of theirs is none here."""
        self.left_out.append((name, value, reason))

    def rename(self, names: Mapping[str, str]) -> None:
        """Takes settings that only have another name here."""
        for name, key in names.items():
            value = self.take(name)
            if value is not None:
                self.put(key, value)

    def drop(self, reasons: Mapping[str, str]) -> None:
        """Leaves out settings that have no counterpart. One that is off or empty asks for nothing, and is not told."""
        for name, reason in reasons.items():
            value = self.take(name)
            if value not in (None, False, "", "no", [], {}):
                self.leave_out(name, value, reason)

    def finish(self) -> None:
        """Names what nobody has taken."""
        self.drop(dict.fromkeys(list(self.values), NOT_KNOWN))


def _read_quoted(name: str, value: Any) -> Any:
    """A number or a truth value that stands in quotes, which those projects read as what it is; other values as is.

    Names stay text: a run may be called 1.10.
    """
    if not isinstance(value, str) or any(word in name for word in TEXTS):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return value
