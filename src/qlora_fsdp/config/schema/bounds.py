"""How a field of the schema says which values it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a setting takes: those from `low` on, or above it if `low` is excluded, below `high`."""

    low: float
    includes_low: bool
    high: float

    def allow(self, value: float) -> bool:
        """Whether a setting may have this value."""
        return self.low < value < self.high or (self.includes_low and value == self.low)

    def __str__(self) -> str:
        text = f"at least {self.low:g}" if self.includes_low else f"greater than {self.low:g}"
        return text + (f" and less than {self.high:g}" if math.isfinite(self.high) else "")


def bounds(*, at_least: float | None = None, above: float | None = None, below: float = math.inf) -> dict[str, Bounds]:
    """The metadata of a field whose numbers are bounded; give either `at_least` or `above`."""
    low = above if at_least is None else at_least
    assert low is not None, "a bounded setting has a lower bound"
    return {"bounds": Bounds(low, at_least is not None, below)}


def one_of(*values: Any) -> dict[str, tuple[Any, ...]]:
    """The metadata of a field that takes these values, which are not of one type."""
    return {"values": values}


# The metadata of a field that takes text or a list of texts.
TEXT_OR_LIST = {"text_or_list": True}
