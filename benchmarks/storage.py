"""The cost of the check, before each update, that Parameters are at the addresses that the graph reads:
``python -m benchmarks.storage``.

Updates of the small MLP with and without the check take turns. An update takes a few milliseconds, so that the check
has its largest share there. gaccum_ms/backend/storage.py explains the check.
"""

from __future__ import annotations

from statistics import median

from benchmarks.ways import WAYS, Setting
from benchmarks.worker import timed

ROUNDS, UPDATES = 40, 10
MOST = 1.02  # times an update without the check


def main() -> int:
    from gaccum_ms.backend import graphs

    program = WAYS["ours"].build(Setting("mlp", "ours", 16, 256))
    program.step()
    look, ratios = graphs._let_go_of_moved, []
    for number in range(ROUNDS):
        seconds = {}
        for looks in (True, False) if number % 2 else (False, True):  # the order alternates
            graphs._let_go_of_moved = look if looks else lambda cell: None
            seconds[looks] = median(timed(program.step) for _ in range(UPDATES))
        ratios.append(seconds[True] / seconds[False])
    graphs._let_go_of_moved = look
    (_, storage), *_ = graphs._storage.values()
    alone = median(timed(storage.moved) for _ in range(1000))
    print(f"{len(storage.places)} Parameters: {alone * 1e6:.0f} µs; an update with the look, without as 1: ", end="")
    print(f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f} in {ROUNDS} turns), at most {MOST}")
    return int(median(ratios) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
