"""The compiled graph of an update in semi-auto parallel mode on eight devices: ``python -m benchmarks.semi_auto``.

It compares MindSpore's own cell and ours: the collectives that a device executes, with purpose and bytes; the number of
nodes in the finished graph; and the compile time, with and without `mindspore.lazy_inline` . No device is needed: rank
0 of eight compiles, by the modules of tests/semi_auto, and NumPy runs each finished graph on eight simulated devices
(tests/semi_auto/machine.py) and records the collectives.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_HERE = Path(__file__).resolve().parent
sys.path += [str(_HERE.parent / "tests" / "semi_auto"), str(_HERE.parent / "tests")]

from compile_worker import SAMPLES  # noqa: E402
from compiled import RANKS, Case, Compiler  # noqa: E402
from finished_graph import COLLECTIVES, Graph, Node, Program  # noqa: E402
from machine import Machine  # noqa: E402
from support import no_device  # noqa: E402

from benchmarks import report  # noqa: E402

MICRO_SIZES = (1, 4, 16)
WHOLE = "plain"
# title: the cases of the two-layer network, without and with lazy_inline
COMPARED = {
    "MindSpore's GradAccumulationCell": ("framework", "framework lazy"),
    "gaccum_ms": ("ours", "lazy"),
    "gaccum_ms, PerSampleLoss": ("per sample", "per sample lazy"),
}
DEEP = {"gaccum_ms, seven layers of nn.Dense": ("deep", "lazy deep")}  # these are only compiled
DEEP_MICRO_SIZE = 16
PURPOSES = ("gradients", "inputs gathered", "losses", "others")


class Row(NamedTuple):
    """One training step. `collectives` and `bytes` by kind and purpose."""

    title: str
    lazy: bool
    micro_size: int
    collectives: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]
    nodes: int
    seconds: float
    note: str = ""

    def of(self, purpose: str) -> tuple[int, int]:
        """Collectives and bytes for one purpose."""
        numbers, sizes = (
            sum(number for (_, one), number in counter.items() if one == purpose)
            for counter in (self.collectives, self.bytes)
        )
        return numbers, sizes


def _sources(node: Node, graph: Graph) -> set[str]:
    """The graph parameters from which a node is computed."""
    nodes = {one.name: one for one in graph.nodes}
    waiting, seen = list(node.arguments), set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += nodes[name].arguments if name in nodes else ()
    return {name for name in seen if name.startswith("%para")}


def purpose(node: Node, program: Program) -> str:
    """The purpose of a collective, one of `PURPOSES` .

    The compiler puts a "mirror" at each use of a weight; its backward reduces the gradient. A gathered input is
    computed from the inputs alone. A loss is the scalar that the forward reduces; its backward is another purpose.
    """
    if "mirror" in node.attributes.lower() and node.op in ("AllReduce", "ReduceScatter"):
        return "gradients"
    if node.op == "AllGather" and any(one is node for one in program.entry.nodes):
        sources = _sources(node, program.entry)
        if sources and all("_inputs" in source for source in sources):
            return "inputs gathered"
    if node.op == "AllReduce" and not node.shape and not node.scope.startswith("Gradients/"):
        return "losses"
    return "others"


def measure(case: Case, title: str, lazy: bool, micro_size: int, runs: bool = True) -> Row:
    """Read a case, and run it once on eight simulated devices if its collectives are needed."""
    if not (case.folder / "finished.ir").exists():
        return Row(title, lazy, micro_size, Counter(), Counter(), 0, 0.0, case.message.strip().splitlines()[0])
    program, collectives, sizes = case.program, Counter(), Counter()
    if runs:
        rng = np.random.default_rng(0)
        machine = Machine(program, RANKS, case.parameters)
        machine.step(*([rng.normal(size=(SAMPLES, n)).astype(np.float32) for _ in range(RANKS)] for n in (12, 1)))
        for node, size in machine.executed:
            if node.op in COLLECTIVES:
                what = node.op, purpose(node, program)
                collectives[what] += 1
                sizes[what] += size
    nodes = sum(len(graph.nodes) for graph in program.graphs.values())
    return Row(title, lazy, micro_size, collectives, sizes, nodes, case.seconds)


def names(ways: dict[str, tuple[str, str]], micro_sizes: Sequence[int]) -> list[tuple[str, str, bool, int]]:
    """Case, title, whether it has lazy_inline, and micro_size, for everything that is compared."""
    return [
        (f"{case}, {micro_size}", title, bool(lazy), micro_size)
        for lazy in (0, 1)
        for title, cases in ways.items()
        for case in cases[lazy : lazy + 1]
        for micro_size in micro_sizes
    ]


def _title(row: Row) -> str:
    return row.title + ", lazy_inline" * row.lazy


def collectives_table(rows: list[Row]) -> str:
    kinds = sorted({what for row in rows for what in row.collectives}, key=lambda what: (PURPOSES.index(what[1]), what))
    columns = [*kinds, *(("", purpose) for purpose in PURPOSES if purpose not in {what[1] for what in kinds})]
    above = f"{'':<52}" + "".join(f"{purpose:>20}" for _, purpose in columns)
    title = f"{'executed per update and device: number, bytes':<46}{'micro':>6}"
    title += "".join(f"{kind or 'none':>20}" for kind, _ in columns) + f"{'all':>7}"
    lines = [above, title, "-" * len(title)]
    for row in rows:
        cells = [f"{_title(row):<46}{row.micro_size:>6}"]
        if row.note:
            lines.append(f"{cells[0]}  not compiled: {row.note}")
            continue
        cells += [f"{row.collectives[what]:>12}{row.bytes[what]:>8}" for what in columns]
        lines.append("".join(cells) + f"{row.collectives.total():>7}")
    return "\n".join(lines)


def compile_table(rows: list[Row]) -> str:
    title = f"{'to compile':<46}{'micro':>6}{'nodes':>8}{'seconds':>9}{'lazy_inline: nodes':>20}{'seconds':>9}"
    lines = [title, "-" * len(title)]
    lazy = {(row.title, row.micro_size): row for row in rows if row.lazy}
    for row in rows:
        if row.lazy:
            continue
        with_it = lazy.get((row.title, row.micro_size))
        cells = [f"{row.title:<46}{row.micro_size:>6}{row.nodes:>8}{row.seconds:>9.1f}"]
        cells += [f"{with_it.nodes:>20}{with_it.seconds:>9.1f}" if with_it else f"{'-':>20}{'-':>9}"]
        lines.append("".join(cells))
    return "\n".join(lines)


def targets(rows: list[Row]) -> list[str]:
    """The targets of our cell, and their verdicts in this run."""
    whole = next(row for row in rows if row.title == WHOLE_TITLE)
    ours = [row for row in rows if row.title.startswith("gaccum_ms")]
    once = [row for row in ours if row.title.endswith("PerSampleLoss")]
    promises: dict[str, Any] = {
        "gradients are reduced as often, and in as many bytes, as the whole batch's": [
            row.of("gradients") == whole.of("gradients") for row in ours
        ],
        "no input is gathered": [row.of("inputs gathered") == (0, 0) for row in ours],
        "PerSampleLoss: no collective more than the whole batch has": [
            row.collectives == whole.collectives and row.bytes == whole.bytes for row in once
        ],
    }
    return [
        f"{'PASS' if kept and all(kept) and not any(row.note for row in ours) else 'FAIL':<6}{text}"
        for text, kept in promises.items()
    ]


WHOLE_TITLE = "nn.TrainOneStepCell, whole batch"
_EXPLANATIONS = f"""\
This is what the compiler makes, not a run on hardware: no time of an update was measured, and none may be inferred. The
graphs were compiled for {RANKS} GPUs by rank 0 of {RANKS} processes that have none, and run in NumPy, where each
collective that a device executes is counted when it executes.
bytes      of what a device hands to these collectives, together: of an AllGather, its own part
gradients  the reduction of a weight's gradient over the devices
inputs     a part of the batch that every device gets from all others
losses     the reduction of a loss over the devices, in the forward
others     all else: here the loss's backward, where the compiler reduces its seed
nodes      of all graphs in the finished file; the network is one that is called, with lazy_inline
seconds    of the processor, by rank 0, to compile once for each line: to compare, not to quote. MindSpore documents
           lazy_inline for Ascend; the front end's passes, which these are, know it for GPUs too
network    12 -> 32 -> 1 with squared errors, three weights, {SAMPLES} float32 samples on each device, SGD"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semi_auto", description=__doc__)
    parser.add_argument("--micro-sizes", nargs="+", type=int, choices=MICRO_SIZES, default=list(MICRO_SIZES))
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    options = parser.parse_args()
    if reason := no_device.why_not():
        parser.exit(2, f"error: {reason}\n")
    packages = ("mindspore", "numpy", "nvidia-cuda-runtime-cu11", "nvidia-cudnn-cu11")
    head = report.machine("Semi-auto parallel mode: an update as the compiler makes it for eight devices", packages)
    compared = [(WHOLE, WHOLE_TITLE, False, 1), *names(COMPARED, options.micro_sizes)]
    deep = names(DEEP, [size for size in options.micro_sizes if size == DEEP_MICRO_SIZE])
    place = tempfile.TemporaryDirectory(prefix="gaccum_ms_semi_auto_")
    with place as folder, Compiler(Path(folder)) as compiled:
        rows = [measure(compiled(name), *rest) for name, *rest in compared]
        deep_rows = [measure(compiled(name), *rest, runs=False) for name, *rest in deep]
    parts = [head, collectives_table(rows), compile_table(rows + deep_rows), _EXPLANATIONS, "\n".join(targets(rows))]
    text = "\n\n".join(parts) + "\n"
    print(text, end="")
    report.keep(text, options.output or report.place(f"semi_auto_{RANKS}_devices"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks
    main()
