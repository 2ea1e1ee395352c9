"""The page: a summary of the training, and a chart of each number over the updates."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from gaccum_ms.report.chart import STYLE, Axis, Series, line_chart
from gaccum_ms.report.records import Record, Window

DOCTYPE = "<!DOCTYPE html>"  # a file that begins so may be overwritten
PAGE_STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1380px; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0; }
p { margin: 0.2rem 0; overflow-wrap: anywhere; }
.note, .detail { opacity: 0.75; font-size: 0.875rem; }
.facts { display: flex; flex-wrap: wrap; gap: 0.75rem; margin: 1rem 0; padding: 0; }
.facts div { border: 1px solid #8886; border-radius: 6px; padding: 0.5rem 0.9rem; }
.facts dt { font-size: 0.8125rem; opacity: 0.75; }
.facts dd { font-size: 1.25rem; margin: 0; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5rem 1rem; }
.chart { display: block; width: 100%; height: auto; }
"""
Number = Callable[[Window], float]


def page(records: Sequence[Record]) -> str:
    """One HTML page, which needs no other file and no network."""
    names = ", ".join(_names(records))
    notes = [note for record in records for note in record.notes]
    notes += [
        f"{record.path.name}: the training was resumed; updates that it made again are faint."
        for record in records
        if record.replaced
    ]
    sections = [_section(*chart, records) for chart in _charts(records)]
    return "\n".join(
        [
            DOCTYPE,
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(names)}</title>",
            f"<style>\n{STYLE}{PAGE_STYLE}</style></head><body>",
            f"<h1>{html.escape(names)}</h1>",
            *(f'<p class="note">{html.escape(note)}</p>' for note in notes),
            *map(_facts, records),
            '<div class="charts">',
            *sections,
            "</div>",
            '<p class="note">Made by <code>gaccum-ms report</code>. The horizontal axis counts updates.</p>',
            "</body></html>",
            "",
        ]
    )


def _names(records: Sequence[Record]) -> list[str]:
    """The files' names; with their folders if two names are equal."""
    names = [record.path.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.path) for record in records]


# -- the training at a glance ------------------------------------------------------------------------------------------


def _facts(record: Record) -> str:
    windows = record.windows
    everything = [*windows, *(one for piece in record.replaced for one in piece)]
    losses = [(w.number("loss"), w.update) for w in windows if w.updated and math.isfinite(w.number("loss"))]
    seconds = sum(filter(math.isfinite, (w.number("seconds") for w in everything)))
    facts = [
        ("updates", f"{windows[-1].update - (not windows[-1].updated):,}"),
        ("epochs", f"{windows[-1].number('epoch'):g}"),
        ("last loss", f"{losses[-1][0]:.4g}" if losses else "none"),
        ("least loss", f"{min(losses)[0]:.4g} at update {min(losses)[1]:,}" if losses else "none"),
        ("skipped updates", f"{windows[-1].skipped:,}"),
        ("time in windows", _duration(seconds)),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts" aria-label="{html.escape(record.path.name)}">{items}</dl>'


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


# -- the charts --------------------------------------------------------------------------------------------------------


def _charts(records: Sequence[Record]) -> list[tuple[str, str, Axis, list[tuple[str, Number]], str]]:
    """For each chart: its title, its description, its vertical axis, its numbers, and why they may be missing."""
    terms = max(len(w.numbers("loss_terms")) for record in records for w in record.windows)
    charts: list[tuple[str, str, Axis, list[tuple[str, Number]], str]] = [
        ("Loss", "mean loss of each window", Axis("loss", log=None), [("", _of("loss"))], "no finite loss"),
        (
            "Gradient norm",
            "global norm of the gradient, before clipping",
            Axis("norm", log=None),
            [("", _of("grad_norm"))],
            "not recorded: it needs max_grad_norm= or record_noise=True",
        ),
        (
            "Noise scale",
            "estimate of the critical batch size, in the items that the loss is a mean over",
            Axis("items", log=None),
            [("", _of("noise_scale"))],
            "not recorded: it needs record_noise=True",
        ),
        (
            "Window size",
            "items that the loss of a window is a mean over: samples, or what count= counts",
            Axis("items", zero=True),
            [("", _of("count"))],
            "several losses have no count in common",
        ),
        (
            "Batches",
            "batches of a window, on rank 0",
            Axis("batches", zero=True),
            [("", _of("batches"))],
            "not recorded",
        ),
        (
            "Learning rate",
            "of the first parameter group",
            Axis("learning rate", log=None),
            [("", _of("learning_rate"))],
            "not recorded",
        ),
        (
            "Skipped updates",
            "windows that made no update, and micro-batches that were dropped, so far",
            Axis("number", zero=True),
            [
                ("windows", lambda window: window.skipped or math.nan),
                ("micro-batches", lambda window: window.dropped or math.nan),
            ],
            "none: every window made its update, and no micro-batch was dropped",
        ),
        ("Loss scale", "of mixed precision", Axis("scale", log=None), [("", _of("loss_scale"))], "no loss scaling"),
        (
            "Time",
            "seconds from the beginning of a window's first batch to the end of its update",
            Axis("s", log=None),
            [("", _of("seconds"))],
            "not recorded",
        ),
    ]
    if terms:
        lines = [(f"loss {n + 1}", _term(n)) for n in range(terms)]
        charts.insert(
            1, ("Loss terms", "mean of each loss, unweighted", Axis("loss", log=None), lines, "no finite loss")
        )
    return charts


def _of(name: str) -> Number:
    return lambda window: window.number(name)


def _term(number: int) -> Number:
    def term(window: Window) -> float:
        terms = window.numbers("loss_terms")
        return terms[number] if number < len(terms) else math.nan

    return term


def _section(
    title: str, about: str, axis: Axis, lines: list[tuple[str, Number]], why_not: str, records: Sequence[Record]
) -> str:
    series = []
    for place, (record, name) in enumerate(zip(records, _names(records), strict=True)):
        for number, (label, value) in enumerate(lines):
            colour, shown = (
                place * len(lines) + number,
                ", ".join(filter(None, (name if len(records) > 1 else "", label))),
            )
            series.append(Series(shown, _points(record.windows, value), colour))
            series += [Series("", _points(piece, value), colour, faint=True) for piece in record.replaced]
    head = f'<section><h2>{html.escape(title)}</h2><p class="detail">{html.escape(about)}</p>'
    if not any(math.isfinite(y) for one in series for _, y in one.points):
        return f"{head}<p>{html.escape(why_not)}</p></section>"
    return f"{head}{line_chart(series, Axis('update'), axis, f'{title}: {about}')}</section>"


def _points(windows: Sequence[Window], value: Number) -> list[tuple[float, float]]:
    return [(float(window.update), value(window)) for window in windows]
