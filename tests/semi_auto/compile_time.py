"""The compiler's CPU seconds for our step beside MindSpore's own cell: the table of docs/parallel.md.

    python -m tests.semi_auto.compile_time

A round compiles each step once, in a random order, all rounds in one process, of which the first is not counted: there
the sources of our functions and of MindSpore's are read from disk. A step's ratio is its seconds by those of
MindSpore's cell in the same round. The network has seven layers.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.semi_auto.cases import DEEP
from tests.semi_auto.compiled import AGAIN, Compiler

ROUNDS = 3


def main() -> None:
    steps = [(f"{lazy}deep", kind, size) for kind in DEEP for lazy in ("", "lazy ") for size in (4, 16)]
    seconds: dict[tuple, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Compiler(Path(folder), saves_graphs=False) as compiler:
        for number in range(1 + ROUNDS):
            for step in random.sample(steps, len(steps)):
                name, kind, size = step
                seconds[step].append(compiler(f"{name}, {kind}, {size}{AGAIN}{number}").seconds)
    for name, kind, size in steps:
        own, theirs = (seconds[name, which, size][1:] for which in (kind, "framework"))
        ratio = statistics.median(one / other for one, other in zip(own, theirs, strict=True))
        print(f"{kind}, {name}, {size} micro-batches: {statistics.median(own):.1f} s, {ratio:.2f}")


if __name__ == "__main__":
    main()
