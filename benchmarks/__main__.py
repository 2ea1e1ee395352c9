"""The command: ``python -m benchmarks``. Measures, prints the table and the targets, and keeps both as text, with the
numbers beside it as JSON and as a picture."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import controller, picture, report, rows, targets
from benchmarks.networks import COMPARED, NETWORKS
from benchmarks.ways import THREADS, WAYS


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=COMPARED)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--micro-sizes", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[1, 2], metavar="N", help="ranks that share a batch (default: 1 2)"
    )
    parser.add_argument(
        "--threads", choices=THREADS, default="tuned", help="MindSpore's, by tune_cpu_threads() or not (default: tuned)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program (default: 3)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds in a turn, at least one update (default: 0.3)")
    parser.add_argument("--first-calls", type=int, default=2, help="fresh processes for each first call (default: 2)")
    parser.add_argument("--limit", type=float, default=120, help="seconds a program may take to answer (default: 120)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument(
        "--from", dest="kept", nargs="+", type=Path, metavar="JSON", help="measure nothing: join what runs have kept"
    )
    return parser.parse_args()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(options: argparse.Namespace) -> Iterator[tuple[str, list[rows.Row], rows.FirstCalls]]:
    """What was measured so far, after each network: all of them take an hour or more, which something may end."""
    head = report.header(rounds=options.rounds, turn=options.turn)
    found: list[rows.Row] = []
    first_calls: rows.FirstCalls = {}
    for network in options.networks:
        batch = options.batch or NETWORKS[network].batch
        every = {"threads": options.threads, "limit": options.limit, "log": _log}
        if "ours" in options.ways and options.first_calls:
            first_calls[network] = controller.measure_first_calls(
                network, batch=batch, repeats=options.first_calls, **every
            )
        groups = controller.groups(
            network, options.ways, options.micro_sizes, options.processes, batch, options.threads
        )
        own: list[rows.Row] = []
        for number, group in enumerate(groups):
            name = f"{network}, group {number + 1} of {len(groups)}"
            own += controller.measure(
                group, name, rounds=options.rounds, turn=options.turn, limit=options.limit, log=_log
            )
        controller.measure_base_peaks(own, **every)
        found += own
        yield head, found, first_calls


def _text(head: str, found: Sequence[rows.Row], first_calls: rows.FirstCalls) -> str:
    lines = "\n".join(target.line() for target in targets.targets(found, first_calls))
    return f"{head}\n{report.table(found)}\n\n{report.explanations()}\n\ntargets, on two cores\n{lines}\n"


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the clean-up, a signal does not
    for results in [rows.load(options.kept)] if options.kept else _measure(options):
        text = _text(*results)
        output = report.keep(text, f"cpu_{os.cpu_count()}_cores", options.output)
        rows.save(output.with_suffix(".json"), *results)
        if importlib.util.find_spec("matplotlib") is not None:
            picture.draw(results[1], output.with_suffix(".png"))
    print(text, end="")
    if importlib.util.find_spec("matplotlib") is None:
        _log("matplotlib is not installed: no picture")
    _log(f"kept in {output}, with .json and .png beside it")


if __name__ == "__main__":
    main()
