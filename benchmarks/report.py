"""The results as text: the machine, the table, and the files."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import controller
from benchmarks.networks import NETWORKS
from benchmarks.rows import WHOLE, Row, beside, find, growth_ratio, time_ratio, whole_of
from benchmarks.ways import WAYS

_RESULTS = Path(__file__).resolve().parent / "results"
_MEGABYTE = 1e6
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")


def machine(title: str, packages: Iterable[str], threads: str = "as the frameworks choose") -> str:
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
            f"threads   {threads}",
            f"variables {variables or 'none set'}",
        ]
    )


def header(*, rounds: int, seconds: float, turn: float) -> str:
    return "\n".join(
        [
            machine(
                "Gradient accumulation: time, first call and memory",
                ("mindspore", "torch", "mindcv", "numpy"),
                "above each table",
            ),
            f"settings  Momentum, float32, graph mode but where the way says PyNative; at least {rounds} rounds, and "
            f"up to {controller.MOST_ROUNDS} as long as {seconds:g} s have not passed, in each every program of a "
            f"group in turn for {turn:g} s, at least one update; a round before them counts for nothing",
        ]
    )


def table(rows: Sequence[Row]) -> str:
    """One block for each network and number of processes, with one part for each group of programs that took turns. The
    whole batch is first in each part; ratios are relative to it."""
    lines = []
    for network, parallel in dict.fromkeys((row.network, row.processes > 1) for row in rows):
        own = [row for row in rows if (row.network, row.processes > 1) == (network, parallel)]
        lines += ["", f"{network}: {NETWORKS[network].title}; batch {own[0].batch}"]
        lines += ["in data parallel mode, the batch shared by the processes"] if parallel else []
        lines += [f"threads: {used}" for used in dict.fromkeys(row.threads for row in own if row.threads)]
        lines.append(_titles())
        for group in dict.fromkeys(row.group for row in own):
            lines.append("-" * len(_titles()))
            lines += [_line(row, rows) for row in own if row.group == group]
    return "\n".join(lines)


def explanations() -> str:
    return "\n".join(
        [
            "ms/update    median over rounds; 'x whole' is the median of the ratios within each round to the whole",
            "             batch, which took turns with the rows below it; 'x torch' is to PyTorch's loop at the same",
            "             micro_size, on as many processes, and of the bare forward and backward to PyTorch's own",
            "first call   compiling and one update, importing not counted. Of ways that are called once for each",
            "             micro-batch, all calls of the first update",
            "memory       growth of the process's peak resident size above the same program's at micro-batches of one",
            "             sample: the framework, compiling, weights, optimizer state and accumulators are in both;",
            "             where micro-batches are of one sample, there is nothing to compare",
            "trains       whether the first update changed the weights. MindSpore's nn.GradAccumulationCell trains in",
            "             semi-auto and auto parallel mode alone: here it never does, so it is not charged for adding",
            "             gradients up. The bare forward and backward has no optimizer and no accumulators: the",
            "             framework's kernels, and as many calls from Python as there are micro-batches, each of which",
            "             returns all gradients",
        ]
    )


def _titles() -> str:
    return (
        f"{'way':<40}{'processes':>10}{'micro_size':>11}{'ms/update':>11}{'x whole':>9}{'x torch':>9}{'first call':>12}"
        f"{'memory MB':>11}{'x whole':>9}{'trains':>8}"
    )


def _line(row: Row, rows: Sequence[Row]) -> str:
    whole = whole_of(rows, row)
    theirs = "torch" if WAYS[row.way].updates else "torch_forward_backward"
    program = theirs, row.micro_size, row.processes
    other = beside(rows, row, *program) or find(rows, row.network, *program)
    cells = [
        f"{WAYS[row.way].title:<40}{row.processes:>10}{row.micro_size:>11}",
        _number(row.seconds, 11, 1, 1e3),
        _number(time_ratio(rows, row, whole), 9, 2),
        _number(time_ratio(rows, row, other), 9, 2),
        _number(row.first_call, 10, 2) + (" s" if row.first_call is not None else "  "),
        _number(row.growth, 11, 1, 1 / _MEGABYTE),
        _number(growth_ratio(row, find(rows, row.network, WHOLE)), 9, 3),
        f"{'-' if row.trains is None else 'yes' if row.trains else 'NO':>8}",
        f"  {row.note}" if row.note else "",
    ]
    return "".join(cells)


def _number(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * scale:>{width}.{digits}f}"


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


def keep(text: str, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
