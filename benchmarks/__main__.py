"""The command: ``python -m benchmarks``. Measures, prints the table and the targets, and keeps both as text."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import controller, report, targets
from benchmarks.networks import COMPARED, NETWORKS
from benchmarks.rows import WHOLE, Row
from benchmarks.ways import WAYS


@dataclass(frozen=True)
class Part:
    """Programs to measure: all combinations of these networks, ways, micro_sizes and numbers of processes."""

    networks: Sequence[str] = COMPARED
    ways: Sequence[str] = tuple(WAYS)
    micro_sizes: Sequence[int] = (1, 4, 16, 64)
    processes: Sequence[int] = (1, 2)


ALL = (
    Part(),
    Part(networks=("mlp", "cnn"), ways=(WHOLE, "ours", "torch"), micro_sizes=(16,), processes=(2, 8)),
    Part(networks=("wide",), ways=(WHOLE, "ours"), micro_sizes=(64,), processes=(1,)),
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__} All that there are targets for; or, with one of the first four options, what these "
        "choose, of the four compared networks, all ways, 1 4 16 64 and 1 2.",
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--micro-sizes", nargs="+", type=int, metavar="N", help="numbers of micro-batches")
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="ranks that share a batch")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program, at least (default: 3)")
    parser.add_argument("--seconds", type=float, default=60, help="and more until these have passed (default: 60)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds in a turn, at least one update (default: 0.3)")
    parser.add_argument("--limit", type=float, default=120, help="seconds a program may take to answer (default: 120)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a part that the command line sets; none for a complete run."""
    named = {one.name: getattr(options, one.name) for one in fields(Part)}
    return {name: value for name, value in named.items() if value is not None}


def _measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows so far after each network: all take an hour or more, and the run may be interrupted."""
    chosen, rows = _chosen(options), []
    times = {"rounds": options.rounds, "seconds": options.seconds, "turn": options.turn}
    for number, part in enumerate([Part(**chosen)] if chosen else ALL, 1):
        for network in part.networks:
            batch = options.batch or NETWORKS[network].batch
            groups = controller.groups(network, part.ways, part.micro_sizes, part.processes, batch)
            own = []
            for place, group in enumerate(groups, 1):
                name = f"{network}, part {number}, group {place} of {len(groups)}"
                own += controller.measure(group, name, **times, limit=options.limit, log=report.log)
            controller.measure_base_peaks(own, limit=options.limit, log=report.log)
            rows += own
            yield rows


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the clean-up, a signal does not
    name = "chosen" if _chosen(options) else f"cpu_{os.cpu_count()}_cores"
    output = options.output or report.place(name)
    head = report.header(rounds=options.rounds, seconds=options.seconds, turn=options.turn)
    for rows in _measure(options):
        verdicts = [target.line() for target in targets.targets(rows)]
        parts = [
            head,
            report.table(rows),
            "",
            report.EXPLANATIONS,
            "",
            "targets, which are for two cores",
            *verdicts,
            "",
        ]
        text = "\n".join(parts)
        report.keep(text, output)
    print(text, end="")
    report.log(f"kept in {output}")


if __name__ == "__main__":
    main()
