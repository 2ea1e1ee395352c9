"""The page: a summary of the training, and a chart of each number over the updates. `page.html` says what is on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import jinja2

from gaccum_ms.report.plots import COLOURS, Line, panels, plot, svg
from gaccum_ms.report.records import SLOW, Record

TIMED = ("rate", "seconds")  # fields whose charts leave out the windows that compile: else these would rule the scale


def page(records: Sequence[Record]) -> str:
    """One HTML page, which needs no other file and no network."""
    names = [record.name for record in records]
    each_counted = [window.values.get("counted") for record in records for window in record.windows]
    counted = next((word for word in ("samples", "batches") if all(each == word for each in each_counted)), "items")
    each = [_facts(record, counted) for record in records]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    terms = max(len(window.numbers("loss_terms")) for record in records for window in record.windows)
    return template.render(
        names=names,
        facts={"record": names if len(names) > 1 else []} | {fact: [facts[fact] for facts in each] for fact in each[0]},
        notes=[note for record in records for note in record.notes],
        terms=[f"loss {number}" for number in range(1, terms + 1)],
        counted=counted,
        slow=f"{SLOW:g}",
        draw=functools.partial(_draw, records),
    )


def _facts(record: Record, counted: str) -> dict[str, str]:
    """What the page says of a record in numbers; "" for what was not recorded."""
    last, epoch = record.windows[-1], record.windows[-1].number("epoch")
    losses = [(w.number("loss"), w.update) for w in record.windows if w.updated and math.isfinite(w.number("loss"))]
    every_window = [*record.windows, *(window for part in record.replaced for window in part)]
    timed = [w for w in every_window if math.isfinite(w.number("rate")) and w.number("seconds") > 0]
    count, time = (sum(window.number(name) for window in timed) for name in ("count", "seconds"))
    seconds = sum(filter(math.isfinite, (window.number("seconds") for window in every_window)))
    size, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return {
        "updates": f"{last.update - (not last.updated):,}",
        "epochs": f"{epoch:g}" if math.isfinite(epoch) else "",
        "last loss": f"{losses[-1][0]:.4g}" if losses else "",
        "least loss": f"{min(losses)[0]:.4g} at update {min(losses)[1]:,}" if losses else "",
        "skipped updates": f"{last.lost[0]:,}",
        "dropped micro-batches": f"{last.lost[1]:,.0f}",
        f"{counted} per second, overall": f"{count / time:,.{1 if count > time else 3}f}" if timed else "",
        "time in windows": f"{seconds / size:.1f} {unit}",
    }


def _draw(
    records: Sequence[Record], field: str, unit: str, zero: bool, labels: Sequence[str]
) -> tuple[str, dict[str, str], bool]:
    """A chart of a field of the records, the colour of each of its labels, and whether it has marks of slow windows;
    without numbers, nothing."""
    lines: list[Line] = []
    slow: list[int] = []
    legend: dict[str, str] = {}
    for record in records:
        name = record.name if len(records) > 1 else ""
        for number, label in enumerate(labels):
            colour = COLOURS[len(legend) % len(COLOURS)]
            legend[", ".join(filter(None, [name, label]))] = colour
            for part, alpha in [*((part, 0.35) for part in record.faint), (record.windows, 1.0)]:
                left_out = [field in TIMED and window.slow for window in part]
                values = [dict(enumerate(window.numbers(field))).get(number, math.nan) for window in part]
                values = [math.nan if out else value for value, out in zip(values, left_out, strict=True)]
                lines.append(Line([window.update for window in part], values, colour, alpha=alpha))
                slow += [window.update for window, out in zip(part, left_out, strict=True) if out]
    if not any(math.isfinite(value) for line in lines for value in line.y):
        return "", {}, False
    figure, (panel,) = panels(1, 5, 2.7)
    plot(panel, lines, zero)
    if slow:  # at the edge beyond which they are: a speed of nearly 0, or a long time
        edge = [0.0 if zero else 1.0] * len(slow)
        panel.plot(slow, edge, "kx", transform=panel.get_xaxis_transform(), clip_on=False)
    panel.set(xlabel="update", ylabel=unit)
    panel.locator_params(axis="x", integer=True)
    return svg(figure), legend if len(legend) > 1 else {}, bool(slow)
