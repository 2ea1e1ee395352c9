"""The best limit of CPU instructions for oneDNN, which MindSpore's kernels on CPU call:
``python -m benchmarks.instructions``.

Our step trains each network without ONEDNN_MAX_CPU_ISA in the environment, and with each of its values, in turns. If a
value makes a network too slow to answer in time, it is left out. The target is that users need not set the variable: a
network with convolutions is no slower without it than with its best value.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.controller import INSTRUCTIONS, measure
from benchmarks.networks import NETWORKS
from benchmarks.rows import Row, round_ratios
from benchmarks.targets import Target
from benchmarks.ways import Setting

CONVOLVE = ("cnn", "resnet18", "mobilenet_v2")
OTHERS = ("mlp", "transformer")
NOTHING = ""  # the variable is not set
VALUES = ("AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "ALL")
_SHARE = 4  # of each network's own batch, so that more than one value answers in time
_MOST = 1.1


def table(network: str, batch: int, rows: dict[str, Row]) -> str:
    title = f"{INSTRUCTIONS:<24}{'ms/update':>11}{'x nothing set':>15}{'first call':>12}"
    lines = ["", f"{network}: {NETWORKS[network].title}; batch {batch}", title, "-" * len(title)]
    for value, row in rows.items():
        line = f"{value or 'nothing set':<24}"
        if row.seconds is None or row.first_call is None:
            lines.append(f"{line}{row.note:>11}")
            continue
        ratio = median(round_ratios(row, rows[NOTHING]) or [float("nan")])
        lines.append(f"{line}{row.seconds * 1e3:>11.1f}{ratio:>15.2f}{row.first_call:>10.2f} s")
    return "\n".join(lines)


def target(network: str, rows: dict[str, Row]) -> Target:
    """The environment without the variable against the best value, the one with the shortest median."""
    answered = {value: row.seconds for value, row in rows.items() if value and row.seconds is not None}
    best = min(answered, key=lambda value: answered[value], default=NOTHING)
    rounds = round_ratios(rows[NOTHING], rows[best]) if best else []
    text = f"{network}: an update with nothing set, of one with {INSTRUCTIONS}={best}, the best"
    return Target(text, median(rounds) if rounds else None, _MOST if network in CONVOLVE else None, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=(__doc__ or ""))
    parser.add_argument("--networks", nargs="+", choices=(*CONVOLVE, *OTHERS), default=[*CONVOLVE, *OTHERS])
    parser.add_argument("--values", nargs="+", default=list(VALUES), help=f"of {INSTRUCTIONS} (default: %(default)s)")
    parser.add_argument("--micro-size", type=int, default=4, help="number of micro-batches (default: 4)")
    parser.add_argument("--batch", type=int, help=f"samples in a batch (default: 1/{_SHARE} of each network's own)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each program (default: 9)")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds in a turn, at least one update (default: 0.3)")
    parser.add_argument("--limit", type=float, default=60, help="seconds a program may take to answer (default: 60)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit runs the clean-up, a signal does not
    os.environ.pop(INSTRUCTIONS, None)
    output = options.output or report.place("instructions")
    lines = [
        report.machine("How far oneDNN may go in the CPU's instructions", ("mindspore", "mindcv", "numpy"), "default"),
        f"settings  gaccum_ms at micro_size {options.micro_size}, graph mode, Momentum; {options.rounds} rounds; the "
        f"second column is the median over rounds, the third that of the ratios within each round",
    ]
    verdicts = ["", "targets"]
    for network in options.networks:
        batch = options.batch or NETWORKS[network].batch // _SHARE
        values = (NOTHING, *options.values)
        settings = [Setting(network, "ours", options.micro_size, batch, "default", instructions=v) for v in values]
        found = measure(
            settings,
            network,
            rounds=options.rounds,
            turn=options.turn,
            limit=options.limit,
            log=lambda text: print(text, file=sys.stderr, flush=True),
        )
        rows = dict(zip(values, found, strict=True))
        lines.append(table(network, batch, rows))
        verdicts.append(target(network, rows).line())
        report.keep("\n".join([*lines, *verdicts, ""]), output)  # the results so far, if the run is interrupted
    print("\n".join([*lines, *verdicts]))
    print(f"kept in {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
