"""Where an update's time goes: ``python -m benchmarks.kernels``.

MindSpore's profiler says how long each kernel ran; what is left of the update is dispatch: Python, the start of the
graph, and what the runtime does between two kernels. Kernels are told apart by the cell that they belong to: those of
the network are the update's own work, those of the window and of its end are accumulation's: slicing, adding up,
clearing, and what scales and clips, with `--max-grad-norm` . One process has nothing to reduce. Updates with and
without the profiler take turns, because the profiler costs time itself.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import controller, report
from benchmarks.networks import NETWORKS
from benchmarks.targets import Target
from benchmarks.ways import WAYS, Program, Setting
from benchmarks.worker import timed

_OURS = ("Default/window-", "Default/update-")
_SHARES = {"mlp": 0.15, "cnn": 0.01}
_DISPATCH = {"mlp": 0.25}


def _kernel_seconds(program: Program, updates: int, folder: Path) -> list[tuple[str, str, float]]:
    """Type, full name, and seconds in an update, of each kernel."""
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


def _measure(setting: Setting, rounds: int, updates: int) -> dict[str, Any]:
    """Medians over rounds; in a process of its own, because the profiler leaves its mark."""
    program = WAYS[setting.way].build(setting)
    program.step()
    found: list[dict[str, float]] = []
    types: dict[str, list[float]] = {}
    for _ in range(rounds):
        times = [timed(program.step) for _ in range(updates)]
        with tempfile.TemporaryDirectory(prefix="gaccum_ms_kernels_") as folder:
            kernels = _kernel_seconds(program, updates, Path(folder))
        own = [(kind, seconds) for kind, name, seconds in kernels if name.startswith(_OURS)]
        found.append(
            {
                "update": median(times),
                "kernels": sum(seconds for *_, seconds in kernels),
                "own": sum(seconds for _, seconds in own),
            }
        )
        for kind in {kind for kind, _ in own}:
            types.setdefault(kind, []).append(sum(seconds for other, seconds in own if other == kind))
    return {
        "update": median(one["update"] for one in found),
        "kernels": median(one["kernels"] for one in found),
        "share": median(one["own"] / one["kernels"] for one in found),
        "dispatch": median(1 - one["kernels"] / one["update"] for one in found),
        "types": {kind: median(seconds) for kind, seconds in types.items()},
    }


def _in_a_process(setting: Setting, rounds: int, updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_kernels_") as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "benchmarks.kernels", "--one", json.dumps(asdict(setting))]
        command += ["--rounds", str(rounds), "--updates", str(updates), "--output", str(out)]
        subprocess.run(
            command, cwd=folder, env=controller.environment(setting), check=True, stdout=subprocess.DEVNULL, timeout=900
        )
        return json.loads(out.read_text())


def table(rows: dict[str, dict[str, Any]]) -> str:
    title = f"{'network':<14}{'ms/update':>11}{'in kernels':>12}{'in none':>10}{'accumulation, of kernels':>26}"
    title += "   its longest, ms"
    lines = [title, "-" * len(title)]
    for network, row in rows.items():
        largest = sorted(row["types"].items(), key=lambda one: -one[1])[:4]
        lines.append(
            f"{network:<14}{row['update'] * 1e3:>11.2f}{row['kernels'] * 1e3:>12.2f}{row['dispatch']:>10.1%}"
            f"{row['share']:>26.1%}   " + ", ".join(f"{kind} {seconds * 1e3:.2f}" for kind, seconds in largest)
        )
    return "\n".join(lines)


def targets(rows: dict[str, dict[str, Any]]) -> list[Target]:
    """Of a run at 16 micro-batches."""
    found = []
    for network, limit in _SHARES.items():
        value = rows.get(network, {}).get("share")
        found.append(Target(f"{network}: time in accumulation's kernels, of that in all kernels", value, limit))
    for network, limit in _DISPATCH.items():
        value = rows.get(network, {}).get("dispatch")
        found.append(Target(f"{network}: time of an update that is in no kernel", value, limit))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mlp", "cnn"])
    parser.add_argument("--micro-size", type=int, default=16, help="number of micro-batches (default: 16)")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: each network's own)")
    parser.add_argument("--threads", choices=("tuned", "default"), default="tuned")
    parser.add_argument("--max-grad-norm", type=float, help="clip (default: not)")
    parser.add_argument("--rounds", type=int, default=5, help="turns with and without the profiler (default: 5)")
    parser.add_argument("--updates", type=int, default=10, help="updates in a turn (default: 10)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = _measure(Setting(**json.loads(options.one)), options.rounds, options.updates)
        options.output.write_text(json.dumps(result))
        return
    threads = "gaccum_ms.tune_cpu_threads()" if options.threads == "tuned" else "MindSpore's defaults"
    title = "Where the time of an update goes, by MindSpore's profiler"
    head = report.machine(title, ("mindspore", "numpy"), threads)
    rows = {}
    for network in options.networks:
        batch = options.batch or NETWORKS[network].batch
        setting = Setting(
            network, "ours", options.micro_size, batch, options.threads, max_grad_norm=options.max_grad_norm
        )
        rows[network] = _in_a_process(setting, options.rounds, options.updates)
    lines = "\n".join(target.line() for target in targets(rows))
    clipping = "" if options.max_grad_norm is None else f", max_grad_norm {options.max_grad_norm:g}"
    head += (
        f"\nsettings  gaccum_ms at micro_size {options.micro_size}{clipping}, graph mode, Momentum; {options.rounds} "
        f"rounds of {options.updates} updates with and as many without the profiler"
    )
    text = f"{head}\n\n{table(rows)}\n\ntargets\n{lines}\n"
    print(text, end="")
    report.keep(text, "kernels", options.output)


if __name__ == "__main__":
    main()
