"""The table of steps and evaluations that grows on the console and in train.log. Imports no torch.

A row has the figures of a step or of an evaluation below their names; what it has no figure for stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_fsdp.common.text import show_duration, show_number

ROWS_BETWEEN_HEADERS = 30
# Name, least width, format and key of each figure; evaluations and hosts without GPUs lack some.
COLUMNS = (
    ("loss", 8, ".4f", "loss"),
    ("eval loss", 9, ".4f", "eval_loss"),
    ("grad norm", 9, ".4f", "grad_norm"),
    ("lr", 8, ".2e", "learning_rate"),
    ("tokens/s/GPU", 12, ",.0f", "tokens_per_second_per_gpu"),
    ("MFU", 4, ".0%", "mfu"),
    ("GiB", 5, ".1f", "gpu_peak_gib"),
)
OPTIONAL = ("eval_loss", "mfu", "gpu_peak_gib")  # whose columns are left out until there is a first figure
GAP = "  "


class ProgressTable:
    """Makes the lines of the table."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.width = num_steps, max(len("step"), 2 * len(str(num_steps)) + 1)
        self._seen: set[str] = set()
        self._rows_to_header = 0

    def row(self, figures: Mapping[str, Any], eta_seconds: float | None = None, note: str = "") -> str:
        """A line with what `figures`, the keys of a line of metrics.jsonl, say of a step or an evaluation."""
        before = len(self._seen)
        self._seen |= {key for key in OPTIONAL if figures.get(key) is not None}
        if len(self._seen) > before:
            self._rows_to_header = 0
        cells = [f"{figures['step']}/{self.num_steps}".ljust(self.width)]
        for name, width, spec, key in self._columns:
            is_skipped = key == "loss" and figures.get("skipped")
            text = "skipped" if is_skipped else show_number(figures.get(key), spec)
            cells.append(text.rjust(max(width, len(name))))
        return GAP.join([*cells, show_duration(eta_seconds).rjust(8), note]).rstrip()

    def with_header(self, row: str) -> list[str]:
        """The row, below the names of the columns where they were not shown lately or are others now."""
        lines = [row]
        if self._rows_to_header == 0:
            self._rows_to_header = ROWS_BETWEEN_HEADERS
            names = [name.rjust(max(width, len(name))) for name, width, _, _ in self._columns]
            lines.insert(0, GAP.join(["step".ljust(self.width), *names, "ETA".rjust(8)]))
        self._rows_to_header -= 1
        return lines

    @property
    def _columns(self) -> Sequence[tuple[str, int, str, str]]:
        return [column for column in COLUMNS if column[3] in self._seen or column[3] not in OPTIONAL]
