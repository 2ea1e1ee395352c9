"""The results as a picture: time, memory and first call against the number of micro-batches, by network and way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.networks import COMPARED
from benchmarks.rows import WHOLE, Row, find, growth_ratio, time_ratio, whole_of
from benchmarks.ways import WAYS

# Okabe and Ito's colours, which most people can distinguish, and markers for those who cannot.
STYLES = {
    WHOLE: ("#000000", "s"),
    "ours": ("#D55E00", "o"),
    "jit": ("#E69F00", "v"),
    "noise": ("#8B4513", "<"),
    "torch": ("#0072B2", "^"),
    "forward_backward": ("#999999", "x"),
    "torch_forward_backward": ("#56B4E9", "+"),
    "mindspore": ("#CC79A7", "D"),
    "boost": ("#009E73", "P"),
    "mindcv": ("#F0E442", "*"),
}
Value = Callable[[Sequence[Row], Row], float | None]


def _time(rows: Sequence[Row], row: Row) -> float | None:
    return time_ratio(rows, row, whole_of(rows, row))


def _memory(rows: Sequence[Row], row: Row) -> float | None:
    return growth_ratio(row, find(rows, row.network, WHOLE))


# A panel's label, the number of processes, and its values. Times are ratios, because groups ran at different times.
PANELS: list[tuple[str, int, Value]] = [
    ("time per update, of the whole batch's", 1, _time),
    ("the same on two processes", 2, _time),
    ("growth of peak memory, of the whole batch's", 1, _memory),
    ("first call, s", 1, lambda rows, row: row.first_call),
]


def points(rows: Sequence[Row], way: str, processes: int, value: Value) -> list[tuple[int, float]]:
    """A way's line: the median at each micro_size over its groups."""
    found: dict[int, list[float]] = {}
    for row in rows:
        measured = value(rows, row) if (row.way, row.processes) == (way, processes) else None
        if measured is not None:
            found.setdefault(row.micro_size, []).append(measured)
    return [(size, median(values)) for size, values in sorted(found.items())]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels for each of the compared networks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    networks = [network for network in COMPARED if any(row.network == network for row in rows)]
    figure = Figure(figsize=(20, 1.5 + 3.5 * max(1, len(networks))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(networks)), len(PANELS), squeeze=False)
    drawn = {}
    for network, line in zip(networks, panels, strict=False):
        own = [row for row in rows if row.network == network]
        sizes = sorted({row.micro_size for row in own})
        for panel, (label, processes, value) in zip(line, PANELS, strict=True):
            for way, (color, marker) in STYLES.items():
                if not (found := points(own, way, processes, value)):
                    continue
                bare = not WAYS[way].updates
                style = {"color": color, "marker": marker, "linestyle": ":" if bare else "-"}
                if way == WHOLE:  # it has no micro-batches, and is the reference level
                    panel.axhline(found[0][1], color=color, linestyle="--", linewidth=0.8)
                (drawn[way],) = panel.plot(*zip(*found, strict=True), **style)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.set_xlabel("micro_size (number of micro-batches)")
            panel.set_ylabel(label)
            panel.set_title(f"{network}, batch {own[0].batch}")
            panel.grid(alpha=0.3)
            if "memory" not in label:  # memory may shrink; times differ by orders of magnitude
                panel.set_yscale("log")
    figure.legend(drawn.values(), [WAYS[way].title for way in drawn], loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
