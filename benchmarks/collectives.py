"""The communication of two processes for one update: ``python -m benchmarks.collectives``.

It counts collectives and bytes, by micro_size and accumulation_steps, of our step and of MindSpore's own, which reduces
each parameter alone. No formula is used: collectives are counted by MindSpore's profiler, bytes are those of the
AllReduces in the finished graph, and both numbers of AllReduces must agree. Then it times a reduction alone, for
buffers of several sizes, to choose `gaccum_ms.distributed.all_reduce.BUFFER_BYTES` . Last, without running anything, it
computes the collectives and copied bytes of a large model's gradients in buffers of several sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report

PROCESSES = 2
NETWORKS = ("mlp", "small")  # in collectives_worker.py, which needs MindSpore
_MEGABYTE = 2**20
_HERE = Path(__file__).resolve().parent
_OURS, _MINDSPORES = "gaccum_ms", "nn.TrainOneStepCell, MindSpore's reducer"
Result = dict[str, Any]


def run(worker: Path, *arguments: str, out: Path, limit: float) -> list[Any]:
    """The content of each rank's ``OUT/rank<N>.json`` , after ``worker OUT ARGUMENTS`` . Ranks save their graphs."""
    settings = {"GLOG_v": "3", "MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_DUMP_IR_PASSES": "validate"}
    settings["MS_DEV_SAVE_GRAPHS_PATH"] = str(out / "graphs")
    path = os.pathsep.join([str(_HERE.parent), str(worker.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "gaccum_ms.launch", "-n", str(PROCESSES), "--log-dir", str(out / "log")]
    finished = subprocess.run(
        [*command, "--timeout", str(int(limit)), str(worker), str(out), *arguments],
        env={**os.environ, **settings, "PYTHONPATH": path},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=limit + 60,
    )
    if finished.returncode:
        raise RuntimeError(f"{worker.name} failed:\n{finished.stdout[-3000:]}{finished.stderr[-3000:]}")
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(PROCESSES)]


def gpt(layers: int, width: int, vocabulary: int, context: int) -> list[int]:
    """The size of each weight of a GPT: embeddings, then for each layer two normalisations, queries, keys, values, the
    output of attention, and the two layers of the feed-forward network."""
    norm, square, wide = [width, width], [width * width, width], [4 * width * width, 4 * width]
    narrow = [4 * width * width, width]
    return [vocabulary * width, context * width, *(norm + square * 4 + norm + wide + narrow) * layers, *norm]


LARGE = {
    "GPT-2 medium": gpt(24, 1024, 50257, 1024),
    "GPT-3 6.7B": gpt(32, 4096, 50257, 2048),
}


def torch_buckets(sizes: list[int], limit: int) -> int:
    """The number of buckets of PyTorch's DistributedDataParallel: the last weight first, the first bucket of 1 MiB, and
    each bucket closed by the weight that fills it."""
    buckets, held, capacity = 0, 0, _MEGABYTE
    for size in reversed(sizes):
        held += size
        if held >= capacity:
            buckets, held, capacity = buckets + 1, 0, limit
    return buckets + bool(held)


def plans_table(rows: list[Result]) -> str:
    """The plan for a large model's gradients."""
    title = f"{'large models, planned and not run':<44}{'buffers of':>12}{'collectives':>13}{'copied MiB':>12}"
    lines = ["", title, "-" * len(title)]
    for row in rows:
        line = f"{row['model']:<44}{row['limit'] // _MEGABYTE:>8} MiB{row['collectives']:>13}"
        lines.append(line + f"{row['copied'] / _MEGABYTE:>12.0f}  {row['note']}".rstrip())
    return "\n".join(lines)


def counts_table(rows: list[Result]) -> str:
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        title = f"{'collectives and bytes per update':<44}{'micro_size':>10}{'accumulation_steps':>20}"
        title += f"{'collectives':>13}{'in the graph':>14}{'bytes':>11}"
        lines += ["", f"{network}, {own[0]['parameters']} parameters", title, "-" * len(title)]
        for row in own:
            line = f"{_OURS if row['ours'] else _MINDSPORES:<44}{row['micro_size']:>10}{row['accumulation_steps']:>20}"
            lines.append(line + f"{row['executed']:>13g}{row['in_graph']:>14}{row['bytes']:>11}")
    return "\n".join(lines)


def times_table(rows: list[Result]) -> str:
    """A ratio is the median over the ratios of each round."""
    lines = []
    for gradients in dict.fromkeys(row["gradients"] for row in rows):
        own = [row for row in rows if row["gradients"] == gradients]
        title = f"{'time of a reduction':<44}{'collectives':>13}{'ms':>10}{'x':>8}"
        lines += ["", gradients, title, "-" * len(title)]
        for row in own:
            ratio = median(mine / base for mine, base in zip(row["seconds"], own[0]["seconds"], strict=True))
            number, seconds = row["collectives"], median(row["seconds"])
            lines.append(f"{row['reducer']:<44}{number:>13}{seconds * 1e3:>10.2f}{ratio:>8.2f}")
    return "\n".join(lines)


def targets(rows: list[Result]) -> list[str]:
    """The target and its verdict: our communication depends on neither number, with no more collectives than
    MindSpore's."""
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        ours = [row for row in own if row["ours"]]
        numbers = {row[key] for row in ours for key in ("executed", "in_graph")}
        sums = {row["accumulation_steps"] > 1: row["bytes"] for row in ours}  # several batches share an update
        passed = len(numbers) == 1 and all(row["executed"] == row["in_graph"] for row in own)
        passed = passed and all(row["bytes"] == sums[row["accumulation_steps"] > 1] for row in ours)
        passed = passed and numbers.pop() <= min(row["executed"] for row in own)
        lines.append(
            f"{'PASS' if passed else 'FAIL':<6}collectives and bytes per update do not depend on micro_size or "
            f"accumulation_steps: {network}"
        )
    note = "With accumulation_steps, the window's three sums go along: 12 bytes." if rows else ""
    return [*lines, "", note]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--micro-sizes", nargs="+", type=int, default=[1, 4, 16], metavar="N")
    parser.add_argument("--accumulation-steps", nargs="+", type=int, default=[1, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each reduction (default: 15; 0: no times)")
    parser.add_argument("--limit", type=float, default=900, help="seconds that the processes may take (default: 900)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    head = report.machine("Collectives per update, two processes in data parallel mode", ("mindspore", "numpy"))
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_collectives_") as folder:
        settings = json.dumps([options.networks, options.micro_sizes, options.accumulation_steps, options.rounds])
        counts, times, plans = run(_HERE / "collectives_worker.py", settings, out=Path(folder), limit=options.limit)[0]
    text = "\n".join([head, counts_table(counts), times_table(times), plans_table(plans), "", *targets(counts), ""])
    print(text, end="")
    report.keep(text, options.output or report.place(f"collectives_{PROCESSES}_processes"))


if __name__ == "__main__":
    main()
