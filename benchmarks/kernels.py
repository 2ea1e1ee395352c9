"""Where an update's time goes: a part of ``python -m benchmarks``, and alone ``python -m benchmarks.kernels``.

MindSpore's profiler measures each kernel's time. The rest of the update is dispatch: Python, the start of the graph,
and the runtime's work between two kernels. Kernels are classified by their cell. Those of the network and of the
optimizer are the update's own work; the others belong to accumulation: slicing, adding, clearing, and scaling and
clipping, which is measured for every network too. One process reduces nothing; collectives.py measures reductions.
Updates with and without the profiler take turns, because the profiler itself costs time.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import controller, report
from benchmarks.networks import NETWORKS
from benchmarks.rows import Results
from benchmarks.targets import CLIPPED, SIZE, targets
from benchmarks.ways import THREADS, WAYS, Program, Setting
from benchmarks.worker import timed

PROFILED = ("mlp", "cnn")
ROUNDS = 5
_TURN = 1.0  # seconds
_FEWEST_UPDATES = 3
# The last two are the loop's condition and the division by a share, for which MindSpore names no cell.
_OURS = ("Default/window-", "Default/update-", "Expand/_LessScalar/", "Expand/_Divs/")


def kernel_seconds(program: Program, updates: int, folder: Path) -> list[tuple[str, str, float]]:
    """Each kernel's type, full name, and seconds in an update."""
    from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(str(folder))):
        for _ in range(updates):
            program.step()
    (details,) = folder.glob("**/cpu_op_detail_info_*.csv")
    with details.open() as lines:
        return [
            (row["op_type"], row["full_op_name"], float(row["op_total_time(ms)"]) / 1e3 / updates)
            for row in csv.DictReader(lines)
        ]


def _measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Medians over rounds, in a separate process, because the profiler changes later measurements."""
    program = WAYS[setting.way].build(setting)
    program.step()
    updates = max(_FEWEST_UPDATES, round(_TURN / timed(program.step)))
    found: list[dict[str, float]] = []
    types: dict[str, list[float]] = {}
    for _ in range(rounds):
        times = [timed(program.step) for _ in range(updates)]
        with tempfile.TemporaryDirectory(prefix="gaccum_ms_kernels_") as folder:
            kernels = kernel_seconds(program, updates, Path(folder))
        own = [(kind, seconds) for kind, name, seconds in kernels if name.startswith(_OURS)]
        found.append(
            {
                "update": mean(times),
                "kernels": sum(seconds for *_, seconds in kernels),
                "own": sum(seconds for _, seconds in own),
            }
        )
        for kind in {kind for kind, _ in own}:
            types.setdefault(kind, []).append(sum(seconds for other, seconds in own if other == kind))
    update, kernels, own = (median(one[what] for one in found) for what in ("update", "kernels", "own"))
    return {
        "update": update,
        "kernels": kernels,
        "share": own / kernels,
        "dispatch": 1 - kernels / update,
        "types": {kind: median(seconds) for kind, seconds in types.items()},
    }


def measure(setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
    """The results of a network, without and with clipping."""
    return {
        setting.network + clipped: _in_a_process(replace(setting, max_grad_norm=norm), rounds)
        for clipped, norm in CLIPPED.items()
    }


def _in_a_process(setting: Setting, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_kernels_") as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.kernels", "--one", json.dumps(asdict(setting))]
        command += ["--rounds", str(rounds), "--output", str(out)]
        subprocess.run(
            command, cwd=folder, env=controller.environment(setting), check=True, stdout=subprocess.DEVNULL, timeout=900
        )
        return json.loads(out.read_text())


def table(rows: dict[str, dict[str, Any]]) -> str:
    title = f"{'network':<23}{'ms/update':>11}{'in kernels':>12}{'in none':>10}{'accumulation, of kernels':>26}"
    title += "   its longest, ms"
    lines = [title, "-" * len(title)]
    for network, row in rows.items():
        largest = sorted(row["types"].items(), key=lambda one: -one[1])[:4]
        lines.append(
            f"{network:<23}{row['update'] * 1e3:>11.2f}{row['kernels'] * 1e3:>12.2f}{row['dispatch']:>10.1%}"
            f"{row['share']:>26.1%}   " + ", ".join(f"{kind} {seconds * 1e3:.2f}" for kind, seconds in largest)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=PROFILED)
    parser.add_argument("--micro-size", type=int, default=SIZE, help="number of micro-batches (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument("--threads", choices=THREADS, default="tuned")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns with and without the profiler (default: 5)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = _measure(Setting(**json.loads(options.one)), options.rounds)
        options.output.write_text(json.dumps(result))
        return
    threads = "gaccum_ms.tune_cpu()" if options.threads == "tuned" else "MindSpore's defaults"
    title = "Where the time of an update goes, by MindSpore's profiler"
    head = report.machine(title, ("mindspore", "numpy"), threads)
    head += f"\nsettings  gaccum_ms at micro_size {options.micro_size}, graph mode, Momentum; {options.rounds} rounds"
    rows: dict[str, dict[str, Any]] = {}
    for network in options.networks:
        batch = options.batch or NETWORKS[network].batch
        rows |= measure(Setting(network, "ours", options.micro_size, batch, options.threads), options.rounds)
    text = f"{head}\n\n{table(rows)}\n"
    if options.micro_size == SIZE:
        lines = [target.line() for target in targets(Results(head, kernels=rows)) if target.value is not None]
        text += "\n".join(["", "targets", *lines, ""])
    print(text, end="")
    report.keep(text, options.output or report.place("kernels"))


if __name__ == "__main__":
    main()
