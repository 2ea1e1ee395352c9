"""What the measurements say: ratios, the targets and whether they are met, and the table as text."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.networks import NETWORKS
from benchmarks.ways import WAYS

FIRST_CALL_SIZES = (2, 64)
_RESULTS = Path(__file__).resolve().parent / "results"
_MEGABYTE = 1e6
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


@dataclass
class Row:
    """What was measured of one program; None and empty where it was not, and `note` says why."""

    network: str
    way: str
    micro_size: int
    turns: list[list[float]] = field(default_factory=list)  # for each round, the seconds of each update
    first_call: float | None = None
    trains: bool | None = None
    peak: int | None = None
    base_peak: int | None = None
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds per update: the median over rounds of each round's median."""
        return median(map(median, self.turns)) if self.turns else None

    @property
    def growth(self) -> int | None:
        """Bytes by which peak memory grows from micro-batches of one sample to the batch measured."""
        return None if self.peak is None or self.base_peak is None else self.peak - self.base_peak


@dataclass(frozen=True)
class Target:
    """A measured ratio that must not exceed its limit. Not measured is not passed."""

    text: str
    value: float | None
    limit: float

    @property
    def passed(self) -> bool:
        return self.value is not None and self.value <= self.limit

    def line(self) -> str:
        verdict = "not measured" if self.value is None else ("PASS" if self.passed else "FAIL")
        value = "-" if self.value is None else f"{self.value:.3f}"
        return f"{verdict:<12}  {self.text}: {value} (at most {self.limit:.3f})"


def time_ratio(row: Row | None, whole: Row | None) -> float | None:
    """How many times the whole batch's time a row takes: the median of the rounds' ratios, since two turns of one
    round see the same machine, and two medians over all rounds need not."""
    if row is None or whole is None or not row.turns or len(row.turns) != len(whole.turns):
        return None
    return median(median(own) / median(base) for own, base in zip(row.turns, whole.turns, strict=True))


def growth_ratio(row: Row | None, whole: Row | None) -> float | None:
    if row is None or whole is None or row.growth is None or whole.growth is None or whole.growth <= 0:
        return None
    return row.growth / whole.growth


def find(rows: Iterable[Row], network: str, way: str, micro_size: int = 1) -> Row | None:
    return next((row for row in rows if (row.network, row.way, row.micro_size) == (network, way, micro_size)), None)


def targets(rows: list[Row], first_calls: dict[str, dict[int, list[float]]]) -> list[Target]:
    """The project's targets, computed from this run alone."""
    few, many = FIRST_CALL_SIZES
    found = []
    for network, seconds in first_calls.items():
        measured = seconds.get(few) and seconds.get(many)
        value = median(seconds[many]) / median(seconds[few]) if measured else None
        found.append(Target(f"first call of ours at {many}, of that at {few} ({network})", value, 1.15))
    whole, ours = find(rows, "cnn", "whole"), find(rows, "cnn", "ours", 16)
    found.append(Target("time per update of ours at 16, of the whole batch's (cnn)", time_ratio(ours, whole), 1.05))
    found.append(Target("memory growth of ours at 16, of the whole batch's (cnn)", growth_ratio(ours, whole), 1 / 6))
    return found


def machine(title: str, packages: Iterable[str]) -> str:
    """The machine and the software, without which the numbers mean nothing."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    threads = ", ".join(f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ)
    return "\n".join(
        [
            title,
            "",
            f"date      {datetime.datetime.now():%Y-%m-%d %H:%M}",
            f"versions  python {platform.python_version()}, "
            + ", ".join(f"{name} {_version(name)}" for name in packages),
            f"machine   {_cpu_model()}, {cores} cores, load average {os.getloadavg()[0]:.1f} when the run began",
            f"threads   {threads or 'as the frameworks choose'}",
        ]
    )


def header(*, batch: int, rounds: int, turn: float) -> str:
    return "\n".join(
        [
            machine("Gradient accumulation: time, first call and memory", ("mindspore", "torch", "numpy")),
            f"settings  batch {batch}, Momentum, float32, graph mode; {rounds} rounds, in each every program in turn "
            f"for {turn:g} s, at least one update",
        ]
    )


def table(rows: list[Row]) -> str:
    """One block for each network. The whole batch comes first; ratios are to it."""
    lines = []
    for network in dict.fromkeys(row.network for row in rows):
        own = [row for row in rows if row.network == network]
        whole = find(own, network, "whole")
        settings = [
            f"{key}={os.environ.get(key, value)}" for key, value in NETWORKS[network].mindspore_environment.items()
        ]
        lines += ["", f"{network}: {NETWORKS[network].title}"]
        lines += [f"MindSpore under {', '.join(settings)}; PyTorch without, unless set outside"] if settings else []
        lines += [_TITLES, "-" * len(_TITLES)]
        lines += [_line(row, whole) for row in own]
    return "\n".join(lines)


def explanations() -> str:
    return "\n".join(
        [
            "ms/update    median over rounds; 'x whole' is the median of the ratios within each round",
            "first call   compiling and one update, importing not counted; one process each",
            "memory       growth of the process's peak resident size above the same program's at micro-batches of one",
            "             sample, so that neither the framework nor compiling is counted",
            "trains       whether the first update changed the weights. MindSpore's nn.GradAccumulationCell trains in",
            "             semi-auto and auto parallel mode alone: here it never does, so it is not charged for adding",
            "             gradients up",
        ]
    )


_TITLES = (
    f"{'way':<40}{'micro_size':>10}{'ms/update':>11}{'x whole':>9}{'first call':>12}{'memory MB':>11}"
    f"{'x whole':>9}{'trains':>8}"
)


def _line(row: Row, whole: Row | None) -> str:
    cells = [
        f"{WAYS[row.way].title:<40}{row.micro_size:>10}",
        _number(row.seconds, 11, 1, 1e3),
        _number(time_ratio(row, whole), 9, 2),
        _number(row.first_call, 10, 2) + (" s" if row.first_call is not None else "  "),
        _number(row.growth, 11, 1, 1 / _MEGABYTE),
        _number(growth_ratio(row, whole), 9, 3),
        f"{'-' if row.trains is None else 'yes' if row.trains else 'NO':>8}",
        f"  {row.note}" if row.note else "",
    ]
    return "".join(cells)


def _number(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * scale:>{width}.{digits}f}"


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


def keep(text: str, name: str, output: Path | None) -> Path:
    """Write a result to `output` , or, under its name and today's date, among those that are kept; returns where."""
    output = output or _RESULTS / f"{name}_{datetime.date.today()}.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    return output
