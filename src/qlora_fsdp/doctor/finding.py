"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The finding of a check about one thing, with what to do unless all is well."""

    level: Literal["green", "yellow", "red"]
    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n{'':<24}-> {self.advice}" if self.advice else ""
        return f"{self.level:<6}  {self.what:<14}  {self.found}{advice}"
