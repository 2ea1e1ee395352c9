"""The command: ``python -m benchmarks``. Measures, prints the table and the targets, and keeps both as text."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from benchmarks import controller, report
from benchmarks.networks import NETWORKS
from benchmarks.ways import WAYS


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--micro-sizes", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--batch", type=int, default=256, help="samples in a batch (default: 256)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (default: 5)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds in a turn, at least one update (default: 0.3)")
    parser.add_argument("--first-calls", type=int, default=3, help="fresh processes for each first call (default: 3)")
    parser.add_argument("--limit", type=float, default=100, help="seconds a program may take to answer (default: 100)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    return parser.parse_args()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the clean-up, a signal does not
    head = report.header(batch=options.batch, rounds=options.rounds, turn=options.turn)
    rows: list[report.Row] = []
    first_calls: dict[str, dict[int, list[float]]] = {}
    for network in options.networks:
        if "ours" in options.ways and options.first_calls:
            first_calls[network] = controller.measure_first_calls(
                network, batch=options.batch, repeats=options.first_calls, limit=options.limit, log=_log
            )
        rows += controller.measure(
            network,
            options.ways,
            options.micro_sizes,
            batch=options.batch,
            rounds=options.rounds,
            turn=options.turn,
            limit=options.limit,
            log=_log,
        )
    lines = "\n".join(target.line() for target in report.targets(rows, first_calls))
    text = f"{head}\n{report.table(rows)}\n\n{report.explanations()}\n\ntargets\n{lines}\n"
    print(text, end="")
    output = report.keep(text, f"cpu_{os.cpu_count()}_cores", options.output)
    _log(f"kept in {output}")


if __name__ == "__main__":
    main()
