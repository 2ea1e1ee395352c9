"""The command: ``python -m benchmarks``. Measures, prints the table and the targets, and keeps both as text, with the
numbers beside it as JSON and as a picture."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import controller, kernels, picture, report, targets
from benchmarks.networks import COMPARED, NETWORKS
from benchmarks.rows import WHOLE, Results
from benchmarks.ways import THREADS, WAYS, Setting


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
        "choose, of the four compared networks, all ways, 1 4 16 64 and 1 2, and no kernels.",
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--micro-sizes", nargs="+", type=int, metavar="N", help="numbers of micro-batches")
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="ranks that share a batch")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument(
        "--threads", choices=THREADS, default="tuned", help="MindSpore's, by tune_cpu() or not (default: tuned)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program, at least (default: 3)")
    parser.add_argument("--seconds", type=float, default=60, help="and more until these have passed (default: 60)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds in a turn, at least one update (default: 0.3)")
    parser.add_argument(
        "--first-calls",
        type=int,
        default=3,
        help="fresh processes for each first call, ours and MindSpore's own cell's (default: 3)",
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds a program may take to answer (default: 120)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--from", dest="kept", type=Path, metavar="JSON", help="measure nothing: what a run has kept")
    return parser.parse_args()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a part that the command line sets; none for a complete run."""
    named = {one.name: getattr(options, one.name) for one in fields(Part)}
    return {name: value for name, value in named.items() if value is not None}


def _measure(options: argparse.Namespace) -> Iterator[Results]:
    """Yield the results so far after each network: all take an hour or more, and the run may be interrupted."""
    chosen = _chosen(options)
    every = {"threads": options.threads, "limit": options.limit, "log": _log}
    times = {"rounds": options.rounds, "seconds": options.seconds, "turn": options.turn}
    results = Results(report.header(**times))
    for number, part in enumerate([Part(**chosen)] if chosen else ALL):
        for network in part.networks:
            batch = options.batch or NETWORKS[network].batch
            if number == 0 and network in COMPARED and "ours" in part.ways and options.first_calls:
                results.first_calls |= controller.measure_first_calls(
                    network, batch=batch, repeats=options.first_calls, **every
                )
            groups = controller.groups(network, part.ways, part.micro_sizes, part.processes, batch, options.threads)
            own = []
            for place, group in enumerate(groups, 1):
                name = f"{network}, part {number + 1}, group {place} of {len(groups)}"
                own += controller.measure(group, name, **times, limit=options.limit, log=_log)
            controller.measure_base_peaks(own, **every)
            results.rows += own
            yield results
    if not chosen:
        for network in kernels.PROFILED:
            _log(f"{network}: kernels")
            batch = options.batch or NETWORKS[network].batch
            try:
                setting = Setting(network, "ours", targets.SIZE, batch, options.threads)
                results.kernels |= kernels.measure(setting, kernels.ROUNDS)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                _log(f"{network}: no kernels: {error}")
            yield results


def _text(results: Results) -> str:
    parts = [results.head, report.table(results.rows), "", report.explanations()]
    if results.kernels:
        parts += ["", f"where an update of gaccum_ms at {targets.SIZE} goes, by MindSpore's profiler"]
        parts += [kernels.table(results.kernels)]
    parts += ["", "targets, which are for two cores", *(target.line() for target in targets.targets(results)), ""]
    return "\n".join(parts)


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the clean-up, a signal does not
    name = "chosen" if _chosen(options) else f"cpu_{os.cpu_count()}_cores"
    output = options.output or (options.kept.with_suffix(".txt") if options.kept else report.place(name))
    draws = importlib.util.find_spec("matplotlib") is not None
    for results in [Results.load(options.kept)] if options.kept else _measure(options):
        text = _text(results)
        report.keep(text, output)
        results.save(output.with_suffix(".json"))
        if draws:
            picture.draw(results.rows, output.with_suffix(".png"))
    print(text, end="")
    _log(f"kept in {output}, with .json{' and .png' if draws else ''} beside it")
    if not draws:
        _log("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
