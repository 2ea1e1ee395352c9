"""The compiler's CPU seconds for our step beside MindSpore's own cell, and the nodes of the graphs: the table of
docs/parallel.md.

    python -m tests.semi_auto.compile_time [--rounds 3] [--kinds mean ratio] [--sizes 4] [--stages 2 | --deeper]

A round compiles each step once, in a random order, all rounds in one process, of which the first is not counted: there
the sources of our functions and of MindSpore's are read from disk. A step's ratio is its seconds by those of
MindSpore's cell in the same round. With stages, seconds and nodes are those of all stages. The network has seven
layers, or 28.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from pathlib import Path

from tests.semi_auto.cases import DEEP
from tests.semi_auto.compiled import AGAIN, Case, Compiler


def graphs(kind: str, case: Case) -> list[Case]:
    """The graphs of a step: windows of several batches have two."""
    return [case.adding, case] if kind == "windows" else [case]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=[kind for kind in DEEP if kind != "framework"])
    parser.add_argument("--sizes", type=int, nargs="*", default=(4, 16))
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--stages", type=int, default=1)
    network.add_argument("--deeper", action="store_true", help="28 layers")
    options = parser.parse_args()
    kinds, stages = ["framework", *options.kinds], options.stages
    name = f"deep {stages}" if stages > 1 else "deeper" if options.deeper else "deep"
    columns = [(f"{lazy}{name}", size) for lazy in ("", "lazy ") for size in options.sizes]
    nodes: dict[tuple, list[int]] = {}
    seconds: dict[tuple, list[list[float]]] = {}
    for saves_graphs, rounds in ((True, 1), (False, options.rounds + 1)):
        with tempfile.TemporaryDirectory() as folder, Compiler(Path(folder), saves_graphs) as compiler:
            for number, (column, size) in itertools.product(range(rounds), columns):
                for kind in random.sample(kinds, len(kinds)):
                    case_name = ("" if stages == 1 else "pipeline, ") + f"{column}, {kind}, {size}"
                    case = compiler(f"{case_name}{AGAIN}{number}", stages)
                    compiled = [[graph.stage(stage) for stage in range(stages)] for graph in graphs(kind, case)]
                    if saves_graphs:
                        nodes[kind, column, size] = [sum(one.nodes for one in graph) for graph in compiled]
                    elif number > 0:
                        times = [sum(one.seconds for one in graph) for graph in compiled]
                        seconds.setdefault((kind, column, size), []).append(times)
    for kind in kinds:
        cells = []
        for column, size in columns:
            rounds = seconds[kind, column, size]
            theirs = [theirs[0] for theirs in seconds["framework", column, size]]
            for graph, number in enumerate(nodes[kind, column, size]):
                own = [times[graph] for times in rounds]
                ratio = statistics.median(one / other for one, other in zip(own, theirs, strict=True))
                cells.append(f"{statistics.median(own):.1f} s, {ratio:.2f} ({number})")
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
