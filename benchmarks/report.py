"""The results as text: the machine, the table, and the files."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import controller
from benchmarks.networks import NETWORKS
from benchmarks.rows import WHOLE, Row, beside, find, growth_ratio, time_ratio, whole_of
from benchmarks.ways import WAYS

_RESULTS = Path(__file__).resolve().parent / "results"
_MEGABYTE = 1e6
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")


def machine(title: str, packages: Iterable[str]) -> str:
    """The machine and the software, without which the numbers mean nothing."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    variables = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
    return "\n".join(
        [
            title,
            "",
            f"date      {datetime.datetime.now():%Y-%m-%d %H:%M}",
            f"versions  {_revision()}, python {platform.python_version()}, "
            + ", ".join(f"{name} {_version(name)}" for name in packages),
            f"machine   {_cpu_model()}, {cores} cores, load average {os.getloadavg()[0]:.1f} when the run began",
            f"variables {variables or 'none set'}",
        ]
    )


def header(*, rounds: int, seconds: float, turn: float) -> str:
    return "\n".join(
        [
            machine("Gradient accumulation: time, first call and memory", ("mindspore", "torch", "mindcv", "numpy")),
            f"settings  Momentum, float32, graph mode but where the way says PyNative; at least {rounds} rounds, and "
            f"up to {controller.MOST_ROUNDS} as long as {seconds:g} s have not passed, in each every program of a "
            f"group in turn for {turn:g} s, at least one update; a round before them counts for nothing",
        ]
    )


def columns(titles: Sequence[str], lines: Iterable[Sequence[object] | None]) -> str:
    """A table: the first column is aligned left, the others right; a None draws a rule."""
    texts = [line and [str(cell) for cell in line] for line in (titles, None, *lines)]
    widths = [max(map(len, cells)) for cells in zip(*filter(None, texts), strict=True)]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    rows = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        if line
        else rule
        for line in texts
    ]
    return "\n".join(row.rstrip() for row in rows)


def number(value: float | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"


TITLES = ("way", "processes", "micro_size", "ms/update", "x whole", "x torch", "first call")
TITLES += ("memory MB", "x whole", "trains", "")


def table(rows: Sequence[Row]) -> str:
    """One block for each network, on one process and on several, with one part for each group of programs that took
    turns. The whole batch is first in each part; ratios are relative to it."""
    lines = []
    for network, parallel in dict.fromkeys((row.network, row.processes > 1) for row in rows):
        own = [row for row in rows if (row.network, row.processes > 1) == (network, parallel)]
        lines += ["", f"{network}: {NETWORKS[network].title}; batch {own[0].batch}"]
        lines += ["in data parallel mode, the batch shared by the processes"] if parallel else []
        lines += [f"threads: {used}" for used in dict.fromkeys(row.threads for row in own if row.threads)]
        cells: list[Sequence[object] | None] = []
        for group in dict.fromkeys(row.group for row in own):
            cells += [None] * bool(cells) + [_cells(row, rows) for row in own if row.group == group]
        lines.append(columns(TITLES, cells))
    return "\n".join(lines)


EXPLANATIONS = """\
ms/update    median over rounds; 'x whole' is the median of the ratios within each round to the whole batch, which took
             turns with the rows below it; 'x torch' is to PyTorch's loop at the same micro_size
first call   compiling and one update, importing not counted
memory       growth of the process's peak resident size above the same program's at micro-batches of one sample
trains       whether the first update changed the weights. MindSpore's nn.GradAccumulationCell trains in semi-auto and
             auto parallel mode alone"""


def _cells(row: Row, rows: Sequence[Row]) -> Sequence[object]:
    return [
        *(WAYS[row.way].title, row.processes, row.micro_size),
        number(row.seconds, 1, 1e3),
        number(time_ratio(row, whole_of(rows, row)), 2),
        number(time_ratio(row, beside(rows, row, "torch", row.micro_size, row.processes)), 2),
        number(row.first_call, 2, unit=" s"),
        number(row.growth, 1, 1 / _MEGABYTE),
        number(growth_ratio(row, find(rows, row.network, WHOLE)), 3),
        "-" if row.trains is None else "yes" if row.trains else "NO",
        row.note,
    ]


def _revision() -> str:
    """The revision of the measured code."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "gaccum_ms, not from a git checkout"
    return f"gaccum_ms {head.strip()}{' with changes' if changes else ''}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def place(name: str) -> Path:
    """The path of a result, from its name and today's date."""
    return _RESULTS / f"{name}_{datetime.date.today()}.txt"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep(text: str, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
