"""The compiler's CPU seconds for our step beside MindSpore's own cell, and the nodes of the graphs: the table of
docs/parallel.md.

    python -m tests.semi_auto.compile_time [--rounds 3] [--kinds mean ratio] [--sizes 4]

A round compiles each step once, in a random order, all rounds in one process, of which the first is not counted: there
the sources of our functions and of MindSpore's are read from disk. A step's ratio is its seconds by those of
MindSpore's cell in the same round. The network has seven layers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from pathlib import Path

from tests.semi_auto.cases import DEEP
from tests.semi_auto.compiled import AGAIN, Compiler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=[kind for kind in DEEP if kind != "framework"])
    parser.add_argument("--sizes", type=int, nargs="*", default=(4, 16))
    options = parser.parse_args()
    kinds = ["framework", *options.kinds]
    columns = [(f"{lazy}deep", size) for lazy in ("", "lazy ") for size in options.sizes]
    nodes: dict[tuple, int] = {}
    seconds: dict[tuple, list[float]] = {}
    for saves_graphs, rounds in ((True, 1), (False, options.rounds + 1)):
        with tempfile.TemporaryDirectory() as folder, Compiler(Path(folder), saves_graphs) as compiler:
            for number, (column, size) in itertools.product(range(rounds), columns):
                for kind in random.sample(kinds, len(kinds)):
                    case = compiler(f"{column}, {kind}, {size}{AGAIN}{number}")
                    if saves_graphs:
                        nodes[kind, column, size] = case.nodes
                    elif number > 0:
                        seconds.setdefault((kind, column, size), []).append(case.seconds)
    for kind in kinds:
        cells = []
        for column, size in columns:
            own, theirs = seconds[kind, column, size], seconds["framework", column, size]
            ratio = statistics.median(one / other for one, other in zip(own, theirs, strict=True))
            cells.append(f"{statistics.median(own):.1f} s, {ratio:.2f} ({nodes[kind, column, size]})")
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
