"""The charts of the site, as HTML that its pages hold: those of the page on performance are made of its own tables."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

from gaccum_ms.report.chart import Axis, Series, line_chart

DOCS = Path(__file__).resolve().parent
MADE = DOCS / "pictures" / "made"  # on each build
WHOLE, SIZES = 1, (1, 4, 16, 64)
ORDER = ("gaccum_ms", "MindSpore's own cell", "boost.GradientAccumulation", "mindcv's TrainStep", "PyTorch's loop")


def make_charts() -> None:
    """Write each chart into a file, which a page takes in."""
    MADE.mkdir(parents=True, exist_ok=True)
    rows = time_rows((DOCS / "performance.md").read_text())
    figures = [_figure(network, time_chart(network, programs)) for network, programs in rows.items()]
    (MADE / "performance.html").write_text(f'<div class="charts">\n{"".join(figures)}</div>\n')
    # Without its own style: on a page of the site its colours are the site's.
    front = re.sub(r"<style>.*?</style>", "", (DOCS / "pictures" / "front.svg").read_text(), flags=re.DOTALL)
    charts = re.findall(r"<svg x=.*?</svg>", front, re.DOTALL)
    titles = ("The loss: the same, update for update", "The memory: what fits is up to you")
    figures = [
        _figure(title, re.sub(r' x="\d+" width="\d+" height="\d+"', "", chart, count=1))
        for title, chart in zip(titles, charts, strict=True)
    ]
    (MADE / "front.html").write_text(f'<div class="charts">\n{"".join(figures)}</div>\n')


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>\n{chart}\n</figure>\n"


def time_rows(page: str) -> dict[str, dict[str, list[float]]]:
    """The first table of the page: of each network, of each program, the time of an update on one process."""
    table = page[page.index("| `micro_size` | 1 | 4 | 16 | 64 |") :].partition("\n\n")[0]
    networks: dict[str, dict[str, list[float]]] = {}
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        network, _, program = name.rpartition(": ")
        if network:
            networks[network] = {}
        program = next(known for known in ORDER if known in program.replace("`", ""))
        networks[list(networks)[-1]][program] = [float(cell) if cell else math.nan for cell in cells[: len(SIZES)]]
    return networks


def time_chart(network: str, programs: dict[str, list[float]]) -> str:
    """Time over the number of micro-batches."""
    series = [
        Series(program, list(zip(map(float, SIZES), programs[program], strict=True)), colour, "both")
        for colour, program in enumerate(ORDER)
    ]
    title = f"{network}: time of an update, as a multiple of the whole batch's"
    return line_chart(
        series,
        Axis("micro-batches", log=True, ticks=SIZES),
        Axis("time, × whole batch", log=None, zero=True),
        title,
    )
