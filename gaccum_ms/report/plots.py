"""Charts of lines, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

# Okabe and Ito's colours, which most people can distinguish.
COLOURS = BLUE, ORANGE, *_ = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
LOG_FROM = 30.0  # an axis is logarithmic if its largest value is this many times its least


class Line(NamedTuple):
    """A line of a chart; a y that is not finite interrupts it."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str = BLUE
    label: str = ""
    marker: str = ""
    style: str = "-"
    alpha: float = 1


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of this size, in inches, with panels beside each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure, axes


def plot(panel: Any, lines: Sequence[Line], zero: bool = False) -> None:
    """Draw lines over a vertical axis that begins at 0, or is logarithmic if the values are far apart."""
    for line in lines:
        gap = ~np.isfinite([math.nan, *line.y, math.nan])
        alone = list(np.flatnonzero(gap[:-2] & ~gap[1:-1] & gap[2:]))  # no line shows them
        marker = {"marker": line.marker} if line.marker else {"marker": ".", "markevery": alone}
        look = {"color": line.colour, "linestyle": line.style, "alpha": line.alpha, "label": line.label}
        panel.plot(line.x, line.y, **look, **marker)
    values = [y for line in lines for y in line.y if math.isfinite(y)]
    if zero:
        panel.set_ylim(bottom=0)
    elif min(values) > 0 and max(values) > LOG_FROM * min(values):
        panel.set_yscale("log")


def svg(figure: Figure) -> str:
    """The figure as an SVG element, the same for the same figure."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gaccum_ms"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()[file.getvalue().index("<svg") :]
