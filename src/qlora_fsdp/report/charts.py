"""Draws line charts and dot plots as SVG, so that a report is one file without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeGuard

from qlora_fsdp.common.text import is_number

WIDTH = 520
HEIGHT = 240
# Margins, which hold the labels of the ticks
LEFT = 62
RIGHT = 24
TOP = 10
BOTTOM = 34
MAX_POINTS = 600  # per line; more can't be seen
LARGEST = 1e100  # of a value that is drawn
MAX_TICKS = 6  # of an axis, about
NUM_COLOURS = 8  # classes c0 to c7 in the page's style


@dataclass(frozen=True)
class Series:
    """A line, or the dots, of a chart.

    Attributes:
        name: the name in the legend and the tooltip.
        xs: ascending numbers.
        ys: as many numbers; None leaves a point out.
        colour: the number of the colour, which wraps around.
        style: `line`, `faint` (a line in the background) or `dots`.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0
    style: str = "line"

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points to draw. Of a long line, these are the lowest and the highest of each group of neighbours."""
        found = [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if _can_be_drawn(y)]
        if self.style == "dots" or len(found) <= MAX_POINTS:
            return found
        size = math.ceil(2 * len(found) / MAX_POINTS)
        groups = [found[first : first + size] for first in range(0, len(found), size)]
        return [point for group in groups for point in _extremes(group)]


def _extremes(group: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest of some points, so that a spike of a single step is seen in a long run."""
    low = min(group, key=lambda point: point[1])
    high = max(group, key=lambda point: point[1])
    return sorted({low, high})


def chart(
    title: str,
    series: Sequence[Series],
    x_label: str = "step",
    x_names: Sequence[str] = (),
    has_legend: bool = False,
) -> str:
    """Returns a chart with its title, or an empty text if there is nothing to draw.

    Args:
        title: the text above the chart.
        series: the lines and dots, drawn in this order.
        x_label: the text below the axis.
        x_names: names for x = 0, 1, ... in place of numbers.
        has_legend: name the lines beside the title, those that are not faint with the value at their end.
    """
    drawn = [(one, one.points) for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one, _ in drawn for x in one.xs]
    ys = [y for _, points in drawn for _, y in points]
    x_low = min(xs)
    x_high = max(xs)
    if x_names:
        x_ticks = [float(index) for index in range(len(x_names))]
        x_low = -0.5
        x_high = len(x_names) - 0.5
    else:
        x_ticks = _whole_ticks(x_low, x_high)
        if x_low == x_high:
            x_low -= 1
            x_high += 1
    y_ticks = ticks(min(ys), max(ys))
    y_low = min(*ys, y_ticks[0])
    y_high = max(*ys, y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return across, down

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick, label in zip(y_ticks, _show_apart(y_ticks), strict=True):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for index, tick in enumerate(x_ticks):
        if x_low <= tick <= x_high:
            x, _ = place(tick, y_low)
            label = escape(x_names[index]) if x_names else _show(tick)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    for one, points in drawn:
        parts += _draw(one, points, [place(x, y) for x, y in points], x_names)
    legend = ""
    if has_legend:
        for one, points in drawn:
            legend += f' <span class="key thin k{one.colour % NUM_COLOURS}"></span>{escape(one.name)}'
            if one.style == "line":
                legend += f", {_show(points[-1][1], 5)} at the end"
    return f"<figure><figcaption><b>{escape(title)}</b>{legend}</figcaption>{''.join(parts)}</svg></figure>"


def _draw(
    one: Series,
    points: Sequence[tuple[float, float]],
    places: Sequence[tuple[float, float]],
    x_names: Sequence[str],
) -> list[str]:
    """The SVG of a series, whose points lie at `places` in the picture."""
    colour = f"c{one.colour % NUM_COLOURS}"
    if one.style != "dots" and len(points) > 1:
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        tip = escape(f"{one.name}: {points[-1][1]:.6g} at the end")
        faint = " faint" if one.style == "faint" else ""
        return [f'<polyline class="{colour}{faint}" points="{path}"><title>{tip}</title></polyline>']
    parts = []
    for (x, y), (across, down) in zip(points, places, strict=True):
        x_name = x_names[int(x)] if x_names else _show(x)
        tip = escape(f"{one.name}: {y:.6g} at {x_name}")
        circle = f'<circle class="{colour}" cx="{across:.1f}" cy="{down:.1f}" r="4">'
        parts.append(f"{circle}<title>{tip}</title></circle>")
    return parts


def running_mean(values: Sequence[float | None], span: int) -> list[float | None]:
    """Returns for each value the mean of the last `span` values up to it. None and NaN are no values."""
    found = [value if _can_be_drawn(value) else None for value in values]
    total = 0.0
    num = 0
    result: list[float | None] = []
    for index, value in enumerate(found):
        if value is not None:
            total += value
            num += 1
        old = found[index - span] if index >= span else None
        if old is not None:
            total -= old
            num -= 1
        result.append(total / num if value is not None else None)
    return result


def _can_be_drawn(value: Any) -> TypeGuard[float]:
    """Whether a value of others is a number that can be drawn, as NaN can't be, nor what has hundreds of digits."""
    return is_number(value) and abs(value) < LARGEST


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers, of which the first is at most `low` and the last at least `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # as a constant line and its running mean
        low -= abs(low) * 0.1 + 1e-9
        high += abs(high) * 0.1 + 1e-9
    rough = (high - low) / (MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _whole_ticks(low: float, high: float) -> list[float]:
    """Returns those of `ticks` that are whole numbers, as steps are; `low` alone if the two are equal."""
    if low == high:
        return [low]
    return [tick for tick in ticks(low, high) if tick == int(tick)]


def _show(number: float, num_digits: int = 4) -> str:
    if number == int(number) and 1 <= abs(number) < 1e7:
        return f"{number:,.0f}"
    if 0 < abs(number) < 1e-3:  # learning rates, alike: 2e-4, 5e-5
        factor, exponent = f"{number:.{num_digits - 1}e}".split("e")
        return f"{factor.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{number:.{num_digits}g}"


def _show_apart(numbers: Sequence[float]) -> list[str]:
    """Shows numbers with as many digits as it takes to tell them apart."""
    texts = ([_show(number, num_digits) for number in numbers] for num_digits in range(4, 16))
    return next(found for found in texts if len(set(found)) == len(numbers))
