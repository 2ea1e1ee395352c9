"""The results as a picture: time, memory and first call against the number of micro-batches, by network and way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.networks import COMPARED
from benchmarks.rows import WHOLE, Row
from benchmarks.ways import WAYS

# Okabe and Ito's colours, which most people can tell apart, and markers for those who cannot.
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
_PANELS: dict[str, Callable[[Row], float | None]] = {
    "time per update, ms": lambda row: None if row.seconds is None else row.seconds * 1e3,
    "growth of peak memory, MB": lambda row: None if row.growth is None else row.growth / 1e6,
    "first call, s": lambda row: row.first_call,
}


def points(rows: Sequence[Row], way: str, value: Callable[[Row], float | None]) -> list[tuple[int, float]]:
    """A way's line: the median at each micro_size, of the groups that it was measured in."""
    found: dict[int, list[float]] = {}
    for row in rows:
        measured = value(row) if row.way == way else None
        if measured is not None:
            found.setdefault(row.micro_size, []).append(measured)
    return [(size, median(values)) for size, values in sorted(found.items())]


def draw(rows: Sequence[Row], path: Path) -> None:
    """The compared networks, programs of one process alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.processes == 1 and row.network in COMPARED]
    networks = [network for network in COMPARED if any(row.network == network for row in rows)]
    figure = Figure(figsize=(15, 1.5 + 3.5 * max(1, len(networks))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(1, len(networks)), len(_PANELS), squeeze=False)
    drawn = {}
    for network, line in zip(networks, panels, strict=False):
        own = [row for row in rows if row.network == network]
        sizes = sorted({row.micro_size for row in own})
        for panel, (label, value) in zip(line, _PANELS.items(), strict=True):
            for way, (color, marker) in STYLES.items():
                if not (found := points(own, way, value)):
                    continue
                bare = not WAYS[way].updates
                style = {"color": color, "marker": marker, "linestyle": ":" if bare else "-"}
                if way == WHOLE:  # has no micro-batches: the level that the others are compared with
                    panel.axhline(found[0][1], color=color, linestyle="--", linewidth=0.8)
                (drawn[way],) = panel.plot(*zip(*found, strict=True), **style)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.set_xlabel("micro_size (number of micro-batches)")
            panel.set_ylabel(label)
            panel.set_title(f"{network}, batch {own[0].batch}")
            panel.grid(alpha=0.3)
            if "memory" not in label:  # which may shrink; times differ by orders of magnitude
                panel.set_yscale("log")
    figure.legend(drawn.values(), [WAYS[way].title for way in drawn], loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
