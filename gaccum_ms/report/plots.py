"""All pictures that the package draws, by matplotlib. It imports none of the classes that it draws: these draw
themselves here."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        f"For 'draw', matplotlib must be installed, but {error}. Run: pip install 'gaccum_ms[report]'"
    ) from error

# Okabe and Ito's colours, which most people can distinguish.
COLOURS = BLUE, ORANGE, GREEN, PURPLE, SKY = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
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


def save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def draw_noise_scale(records: Sequence[Any], path: str | Path) -> None:
    """Noise scale and batch over updates, and the updates and examples that each batch size needs. `records` : the
    `ScaleRecord` of each update."""
    figure, (over_updates, over_sizes) = panels(2, 11, 4)
    updates = [record.update for record in records]
    over_updates.plot(updates, [record.noise_scale for record in records], color=ORANGE, label="noise scale")
    batches = [record.batch_size for record in records]
    over_updates.plot(updates, batches, color="black", drawstyle="steps-post", label="batch")
    over_updates.set(xlabel="update", ylabel="items", yscale="log", title="noise scale, the critical batch size")
    scale, batch = records[-1].noise_scale, batches[-1]
    sizes = np.geomspace(min(scale, batch) / 16, max(scale, batch) * 16, 101)
    over_sizes.plot(sizes, 1 + scale / sizes, color=BLUE, label="updates")
    over_sizes.plot(sizes, 1 + sizes / scale, color=GREEN, label="examples")
    over_sizes.axvline(scale, color=ORANGE, linestyle=":", label="critical size")
    over_sizes.axvline(batch, color="black", linestyle="--", label="batch")
    over_sizes.set(xlabel="items of a batch", ylabel="times the least", xscale="log", yscale="log")
    over_sizes.set_title("to the same loss")
    over_updates.legend()
    over_sizes.legend()
    save(figure, path)


def draw_token_plan(plan: Any, path: str | Path) -> None:
    """The rows of each micro-batch of a `TokenPlan` , with tokens and padding in two colours."""
    figure, (panel,) = panels(1, 8, 4)
    start = 0
    for width, rows in plan.micro_batches:
        places = start + np.arange(rows.size)
        panel.bar(places, np.full(rows.size, width), width=1, color="#999999", alpha=0.4)
        panel.bar(places, np.where(rows < 0, 0, plan.lengths[rows]), width=1, color=BLUE)
        panel.axvline(start - 0.5, color="black", linewidth=0.5)
        start += rows.size
    panel.set(xlabel="rows, micro-batch by micro-batch", ylabel="tokens", title=f"{plan.padding:.1%} padding")
    save(figure, path)
