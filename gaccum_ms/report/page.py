"""The page: a summary of the training, and a chart of each number over the updates. `page.html` says what is on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gaccum_ms.report.plots import COLOURS, Line, panels, plot, svg
from gaccum_ms.report.records import Record


def page(records: Sequence[Record]) -> str:
    """One HTML page, which needs no other file and no network."""
    names = [record.path.name for record in records]
    if len(set(names)) < len(names):
        names = [str(record.path) for record in records]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    terms = max(len(window.numbers("loss_terms")) for record in records for window in record.windows)
    return template.render(
        facts=dict(zip(names, map(_facts, records), strict=True)),
        notes=[note for record in records for note in record.notes],
        terms=[f"loss {number}" for number in range(1, terms + 1)],
        draw=functools.partial(_draw, records, names),
    )


def _facts(record: Record) -> dict[str, str]:
    windows, last = record.windows, record.windows[-1]
    losses = [(w.number("loss"), w.update) for w in windows if w.updated and math.isfinite(w.number("loss"))]
    every_window = [*windows, *(window for part in record.replaced for window in part)]
    seconds = sum(filter(math.isfinite, (window.number("seconds") for window in every_window)))
    size, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return {
        "updates": f"{last.update - (not last.updated):,}",
        "epochs": f"{last.number('epoch'):g}",
        "last loss": f"{losses[-1][0]:.4g}" if losses else "none",
        "least loss": f"{min(losses)[0]:.4g} at update {min(losses)[1]:,}" if losses else "none",
        "skipped updates": f"{last.skipped:,}",
        "time in windows": f"{seconds / size:.1f} {unit}",
    }


def _draw(
    records: Sequence[Record], names: Sequence[str], field: str, unit: str, zero: bool, labels: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """A chart of a field of the records, and the colour of each of its labels; without numbers, nothing."""
    lines: list[Line] = []
    legend: dict[str, str] = {}
    for name, record in zip(names, records, strict=True):
        for number, label in enumerate(labels):
            colour = COLOURS[len(legend) % len(COLOURS)]
            legend[", ".join(filter(None, [name if len(records) > 1 else "", label]))] = colour
            for part, alpha in [*((part, 0.35) for part in record.replaced), (record.windows, 1.0)]:
                values = [dict(enumerate(window.numbers(field))).get(number, math.nan) for window in part]
                lines.append(Line([window.update for window in part], values, colour, alpha=alpha))
    if not any(math.isfinite(value) for line in lines for value in line.y):
        return "", {}
    figure, (panel,) = panels(1, 5, 2.7)
    plot(panel, lines, zero)
    panel.set(xlabel="update", ylabel=unit)
    panel.locator_params(axis="x", integer=True)
    return svg(figure), legend if len(legend) > 1 else {}
