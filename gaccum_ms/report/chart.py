"""Line charts as SVG elements, for HTML pages.

The page's style defines colours and text size; `STYLE` has defaults.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 260
LEFT_LEAST, RIGHT, TOP, BOTTOM = 34, 14, 12, 44
CHARACTER, LINE = 7.0, 18  # px: the width of a character and the height of a line, for text of 12 px
COLUMNS = 400  # a line of more points than twice this shows the least and the largest of each column
LOG_FROM = 30.0  # an axis with log=None is logarithmic if its largest value is this many times its least

# Okabe and Ito's colours, which most people can distinguish, and lighter ones for a dark background.
STYLE = """\
.chart { --s0: #0072b2; --s1: #d55e00; --s2: #007a5a; --s3: #a3487f; --s4: #8a6d00; color: #222; }
@media (prefers-color-scheme: dark) {
  .chart { --s0: #56b4e9; --s1: #ff8b4d; --s2: #2fc79b; --s3: #e39ac6; --s4: #e6c84f; color: #ddd; }
}
.chart text { font: 12px system-ui, sans-serif; fill: currentColor; }
.chart .grid { stroke: currentColor; stroke-opacity: 0.15; }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
"""
SERIES_COLOURS = 5

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, or dots.

    Args:
        label (str): The text in the legend.
        points (Sequence[Point]): Its points; a y that is not finite interrupts the line.
        colour (int): The number of its colour.
        style (str): ``"line"`` , ``"dots"`` , or ``"both"`` .
        faint (bool): Whether it is pale and behind the others.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    style: str = "line"
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        label (str): Its name and unit.
        log (bool or None): Whether it is logarithmic; None: if all values are positive and far apart.
        ticks (Sequence[float]): The values with numbers; empty: round values.
        zero (bool): Whether it begins at 0, if it is not logarithmic.
    """

    label: str
    log: bool | None = False
    ticks: Sequence[float] = ()
    zero: bool = False


@dataclass(frozen=True)
class _Scale:
    """Maps values to positions."""

    ticks: list[float]
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)


def line_chart(series: Sequence[Series], x: Axis, y: Axis, title: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draw lines.

    Args:
        series (Sequence[Series]): At least one, with at least one finite point among them.
        x (Axis): The horizontal axis.
        y (Axis): The vertical axis.
        title (str): A description of the chart, for people who cannot see it.

    Returns:
        str, an SVG element without width and height: it fills its container.
    """
    across, up = _scale(x, [p[0] for one in series for p in one.points]), _scale(y, _finite_y(series))
    legend = [one for one in series if one.label]
    rows = _rows(legend, width) if len(legend) > 1 else []
    top = TOP + LINE * len(rows)
    left = max(LEFT_LEAST, LINE + 10 + CHARACTER * max(len(_shown(tick)) for tick in up.ticks))

    def place_x(value: float) -> float:
        return left + across.share(value) * (width - left - RIGHT)

    def place_y(value: float) -> float:
        return height - BOTTOM - up.share(value) * (height - BOTTOM - top)

    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">']
    for tick in up.ticks:
        at = f"{place_y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{left:.1f} {at}H{width - RIGHT}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{at}" dy="0.35em" text-anchor="end">{_shown(tick)}</text>')
    for tick in across.ticks:
        anchor = f'x="{place_x(tick):.1f}" y="{height - BOTTOM + 17}" text-anchor="middle"'
        parts.append(f"<text {anchor}>{_shown(tick)}</text>")
    middle = (left + width - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{height - 7}" text-anchor="middle">{html.escape(x.label)}</text>')
    turned = f'transform="translate(13 {(top + height - BOTTOM) / 2:.1f}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{html.escape(y.label)}</text>')
    for one in sorted(series, key=lambda one: not one.faint):
        parts += _drawn(one, across, up, place_x, place_y)
    for number, row in enumerate(rows):
        parts += _legend(row, left, TOP + 4 + LINE * number)
    return "\n".join([*parts, "</svg>"])


def standalone(chart: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """A chart as a separate SVG file."""
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    return f"{begin}{chart.removeprefix('<svg ').replace('>', f'><style>{STYLE}</style>', 1)}\n"


# -- axes --------------------------------------------------------------------------------------------------------------


def _scale(axis: Axis, values: Iterable[float]) -> _Scale:
    found = [value for value in values if math.isfinite(value)] + list(axis.ticks)
    low, high = min(found), max(found)
    log = low > 0 and high / low > LOG_FROM if axis.log is None else axis.log
    if log:
        found = [value for value in found if value > 0]
        low, high = min(found), max(found)
        return _Scale(list(axis.ticks) or _log_ticks(low, high), *_apart(low, high, log=True), log=True)
    low = min(low, 0.0) if axis.zero else low
    low, high = _apart(low, high, log=False)
    ticks = list(axis.ticks) or _round_ticks(low, high)
    return _Scale(ticks, min(low, *ticks), max(high, *ticks), log=False)


def _apart(low: float, high: float, log: bool) -> Point:
    """The two ends, moved apart if they are equal."""
    if high > low * (1 + 1e-9) if log else high - low > 1e-12 * max(abs(high), abs(low), 1e-300):
        return low, high
    return (low / 2, high * 2) if log else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)] or [low, high]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(decades) > 4 else (1, 2, 5)
    every = max(1, len(decades) // 6)
    ticks = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001] or [low, high]


def _shown(value: float) -> str:
    """For example "1,600", "0.25" and "2e-05"."""
    text = f"{value:,.10g}" if abs(value) < 1e7 else f"{value:.3g}"
    return text if len(text) <= 9 else f"{value:.3g}"


# -- lines and dots ----------------------------------------------------------------------------------------------------


def _finite_y(series: Sequence[Series]) -> list[float]:
    return [y for one in series for _, y in one.points if math.isfinite(y)]


def _drawn(
    one: Series, across: _Scale, up: _Scale, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> list[str]:
    colour = f"var(--s{one.colour % SERIES_COLOURS})"
    opacity = ' opacity="0.35"' if one.faint else ""
    parts: list[str] = []
    for piece in _pieces(one.points, across, up):
        at = [(place_x(x), place_y(y)) for x, y in _thinned(piece)]
        if one.style != "dots" and len(at) > 1:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
            parts.append(f'<path class="line" stroke="{colour}"{opacity} d="{path}"/>')
        if one.style != "line" or len(at) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"{opacity}/>' for x, y in at]
    return parts


def _pieces(points: Sequence[Point], across: _Scale, up: _Scale) -> list[list[Point]]:
    """The line in pieces, interrupted at values that cannot be shown."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if across.shows(point[0]) and up.shows(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _thinned(piece: list[Point]) -> list[Point]:
    """The least and the largest point of each column, in their order."""
    if len(piece) <= 2 * COLUMNS:
        return piece
    thinned = []
    for column in range(COLUMNS):
        part = piece[column * len(piece) // COLUMNS : (column + 1) * len(piece) // COLUMNS]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        thinned += sorted(ends)
    return [piece[0], *thinned, piece[-1]]


# -- the legend --------------------------------------------------------------------------------------------------------


def _rows(series: Sequence[Series], width: int) -> list[list[Series]]:
    rows: list[list[Series]] = [[]]
    for one in series:
        if rows[-1] and sum(map(_legend_width, [*rows[-1], one])) > width - 60:
            rows.append([])
        rows[-1].append(one)
    return rows


def _legend_width(one: Series) -> float:
    return 36 + CHARACTER * len(one.label)


def _legend(row: Sequence[Series], left: float, y: float) -> list[str]:
    parts, x = [], left
    for one in row:
        colour, opacity = f"var(--s{one.colour % SERIES_COLOURS})", ' opacity="0.35"' if one.faint else ""
        if one.style != "dots":
            parts.append(f'<path class="line" stroke="{colour}"{opacity} d="M{x:.1f} {y}h18"/>')
        if one.style != "line":
            parts.append(f'<circle cx="{x + 9:.1f}" cy="{y}" r="3" fill="{colour}"{opacity}/>')
        parts.append(f'<text x="{x + 24:.1f}" y="{y}" dy="0.35em">{html.escape(one.label)}</text>')
        x += _legend_width(one)
    return parts
