"""The charts of the site, as HTML that its pages hold: those of the page on performance are made of its own tables."""

from __future__ import annotations

import html
import math
from pathlib import Path

from gaccum_ms.report.plots import COLOURS, Line, panels, plot, svg

DOCS = Path(__file__).resolve().parent
MADE = DOCS / "pictures" / "made"  # on each build
SIZES = (1, 4, 16, 64)
ORDER = ("gaccum_ms", "MindSpore's own cell", "boost.GradientAccumulation", "mindcv's TrainStep", "PyTorch's loop")


def make_charts() -> None:
    """Write the charts into a file, which the page takes in."""
    MADE.mkdir(parents=True, exist_ok=True)
    rows = time_rows((DOCS / "performance.md").read_text())
    charts = "".join(
        f"<figure><figcaption>{html.escape(network)}</figcaption>\n{time_chart(programs)}\n</figure>\n"
        for network, programs in rows.items()
    )
    (MADE / "performance.html").write_text(f'<div class="charts">\n{charts}</div>\n')


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


def time_chart(programs: dict[str, list[float]]) -> str:
    """Time of an update over the number of micro-batches."""
    figure, (panel,) = panels(1, 5, 3.3)
    plot(panel, [Line(SIZES, programs[name], colour, name, "o") for name, colour in zip(ORDER, COLOURS, strict=True)])
    panel.set_xscale("log")
    panel.set_xticks(SIZES, map(str, SIZES))
    panel.minorticks_off()
    panel.set(xlabel="micro-batches", ylabel="time, × whole batch")
    if panel.get_yscale() == "linear":
        panel.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    return svg(figure)
