"""Make an SVG of what a terminal showed: `python scripts/make_screenshot.py docs/first-run.svg < output.txt`.

Lines that begin with `$ ` are what was typed. Everything is text, so that it can be read, searched and copied.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

WIDTH, LINE, LEFT, TOP = 7.8, 18, 16, 44  # of a letter, of a line, and the margins, in pixels
COLORS = {"$ ": "#7ee787", "Fin": "#79c0ff", "Nex": "#79c0ff"}
STYLE = "font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
HARD_SPACE = "\N{NO-BREAK SPACE}"  # browsers draw several ordinary ones as one


def draw(lines: list[str]) -> str:
    """Returns the SVG of a terminal with these lines."""
    width = round(2 * LEFT + WIDTH * max(map(len, lines)))
    height = TOP + LINE * len(lines) + 8
    buttons = "".join(
        f'<circle cx="{20 + 18 * place}" cy="18" r="5.5" fill="{color}"/>'
        for place, color in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    texts = "\n".join(
        f'<text x="{LEFT}" y="{TOP + 12 + LINE * row}" fill="{_color(line)}">'
        f"{escape(line).replace(' ', HARD_SPACE)}</text>"
        for row, line in enumerate(lines)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{buttons}\n'
        f'<g style="{STYLE}">\n{texts}\n</g>\n</svg>\n'
    )


def _color(line: str) -> str:
    return next((color for start, color in COLORS.items() if line.startswith(start)), "#c9d1d9")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(sys.stdin.read().rstrip().splitlines()), encoding="utf-8")
