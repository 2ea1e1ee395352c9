"""Checks with six networks whether a memory limit is kept: ``python -m benchmarks.memory_limit``.

Each program runs in a fresh process. This process watches its resident memory, together with that of its trial's
process; shared memory counts once. For each network:

* alone       training with micro-batches of each size, and nothing before it: the true peak. There are separate true
              peaks for ``micro_batch_size="auto"`` , which always accumulates, in two graphs, with each size given;
* predicted   the first of these peaks by `memory_report` , from one process, with a limit midway between the true peaks
              of a quarter of the batch and half of it: what is larger is predicted;
* searched    `find_micro_batch_size` and ``"auto"`` , each with a limit midway between the true peaks of two
              neighbouring sizes, or just above all if these differ by too little, and then training with the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.networks import NETWORKS
from benchmarks.targets import Target

ROOT = Path(__file__).resolve().parent.parent
BATCHES = {"unet": 32, "mlp": 16384, "cnn": 64, "transformer": 32, "embedding": 64, "dense": 512}
ADAM = ("unet", "embedding", "dense")  # the others train with Momentum
WAYS = {"find": "alone", "auto": "alone auto"}  # a search, and the training that has no search
_UPDATES = 3
_LOOKS_EVERY = 0.02  # seconds
_OWN = ("Private_Clean", "Private_Dirty", "Pss_Shmem")  # the memory that a trial's process does not share
_APART = 0.02  # of a peak: the least difference of two neighbours with a limit between them
_PREDICTED_WITHIN, _KEPT_WITHIN, _USED = 0.15, 1.0, 0.85


# -- the programs, each in a separate process --------------------------------------------------------------------------


def _program(kind: str, name: str, samples: int, number: int) -> dict[str, Any]:
    """`number` : the size for "alone" and "alone auto"; the limit for the others."""
    import mindspore as ms
    from mindspore import nn

    from gaccum_ms import (
        AutoSize,
        GradAccumulationCell,
        TrainOneStepWithGradAccumulationCell,
        find_micro_batch_size,
        memory_report,
    )

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_seed(1)
    network = NETWORKS[name].mindspore()
    weights = network.trainable_params()
    optimizer = nn.Adam(weights, 1e-3) if name in ADAM else nn.Momentum(weights, 0.01, 0.9)
    network = nn.WithLossCell(network, NETWORKS[name].mindspore_loss())
    batch = [ms.Tensor(value) for value in NETWORKS[name].data(samples)]
    if kind == "report":
        found = memory_report(GradAccumulationCell(network, 2), optimizer, *batch, memory_limit=number)
        return {"predicted": {row.micro_batch_size: row.peak for row in found.rows if not row.measured}}
    size = number
    if kind == "find":
        size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch, number)
    options = {"micro_batch_size": AutoSize(number)} if "auto" in kind else {"micro_batch_size": size}
    step = TrainOneStepWithGradAccumulationCell(GradAccumulationCell(network, **options), optimizer).set_train()
    if kind == "alone auto":
        step._runner.runner.cut_into(size)
    for _ in range(_UPDATES):
        step(*batch).asnumpy()
    return {"size": step.micro_batch_size, "peak": bytes_in("/proc/self/status", "VmHWM")}


def bytes_in(file: str, *names: str) -> int:
    """The sum of a /proc file's values of these names, in bytes."""
    found = re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024


# -- watching them -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The program's answer; the peak of the process and its trial's process together, in bytes; the seconds."""

    answer: dict[str, Any]
    both: int
    seconds: float


def _watched(seconds: float, *arguments: Any) -> Outcome:
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", **os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_memory_") as folder, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, __file__, "--program", json.dumps(arguments)]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        both = 0
        try:
            while process.poll() is None:
                both = max(both, together(process.pid))
                if time.monotonic() - start > seconds:
                    raise TimeoutError(f"{arguments} took more than {seconds} s")
                time.sleep(_LOOKS_EVERY)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{arguments}: " + "\n".join(lines[-20:]))
    return Outcome(json.loads(lines[-1]), both, time.monotonic() - start)


def together(process: int) -> int:
    """Resident bytes of a process, plus the bytes of its children that they do not share with it. A process that ends
    is read slowly, up to 0.1 s, so this process is read before and after, and the smaller size counts."""
    own_file = f"/proc/{process}/status"
    try:
        before = bytes_in(own_file, "VmRSS")
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        own = [bytes_in(f"/proc/{child}/smaps_rollup", *_OWN) for child in children]
        return min(before, bytes_in(own_file, "VmRSS")) + sum(own)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


# -- one network -------------------------------------------------------------------------------------------------------


def neighbours(samples: int) -> list[int]:
    """A quarter of the batch, half of it, all sizes between that divide it, and the whole batch."""
    return sorted({samples // 4, -(-samples // 3), samples // 2, samples})


def limit_of(alone: dict[int, int], samples: int) -> int:
    """A limit midway between a quarter of the batch and half of it, or above all sizes if these need about the same."""
    quarter, half = alone[samples // 4], alone[samples // 2]
    return (quarter + half) // 2 if half - quarter > _APART * quarter else round(max(alone.values()) * (1 + _APART))


def measure(name: str, samples: int, runs: int, seconds: float) -> str:
    """The tables and targets of one network."""
    alone: dict[str, dict[int, int]] = {}
    for way, kind in WAYS.items():
        alone[way] = {size: _watched(seconds, kind, name, samples, size).answer["peak"] for size in neighbours(samples)}
    report.log(f"{name}: alone {alone}")
    answer = _watched(seconds, "report", name, samples, limit_of(alone["find"], samples)).answer
    targets, predicted = [], []
    for size, peak in alone["find"].items():
        expected = answer["predicted"].get(str(size))  # None: measured, or no row of the report
        ratio = expected and expected / peak
        texts = [report.number(bytes_, 1, 1e-6) for bytes_ in (peak, expected, alone["auto"].get(size))]
        predicted.append([size, *texts[:2], report.number(ratio, 3), texts[2]])
        if ratio:
            text = f"{name}: peak at {size} samples, predicted off by"
            targets.append(Target(text, abs(ratio - 1), _PREDICTED_WITHIN))
    searched = []
    for way, peaks in alone.items():
        limit = limit_of(peaks, samples)
        fits = max(size for size, peak in peaks.items() if peak <= limit)
        outcomes = [_watched(seconds, way, name, samples, limit) for _ in range(runs)]
        found = [outcome.answer["size"] for outcome in outcomes]
        highest = [max(outcome.both, outcome.answer["peak"]) for outcome in outcomes]
        for outcome, size in zip(outcomes, found, strict=True):
            peaks_ = [report.number(bytes_, 1, 1e-6) for bytes_ in (outcome.both, outcome.answer["peak"])]
            searched.append([way, report.number(limit, 1, 1e-6), fits, size, *peaks_, f"{outcome.seconds:.0f}"])
        targets.append(
            Target(f"{name}, {way}: the peak of search and training, of the limit", max(highest) / limit, _KEPT_WITHIN)
        )
        targets.append(Target(f"{name}, {way}: what fits, over the least found", fits / min(found), 1 / _USED))
        targets.append(Target(f"{name}, {way}: sizes found in {runs} runs", len(set(found)), 2))
    return "\n".join(
        [
            f"{name}, batch {samples}\n",
            report.columns(("samples", "alone MB", "predicted MB", "predicted / alone", "auto alone MB"), predicted),
            "",
            report.columns(
                ("way", "limit MB", "what fits", "found", "search's peak MB", "training's peak MB", "seconds"), searched
            ),
            "",
            *(target.line() for target in targets),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--batch", type=int, help="samples (default: each network's own)")
    parser.add_argument("--runs", type=int, default=1, help="searches of each network and way (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds a program may take (default: 600)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(json.dumps(_program(*json.loads(options.program))))
        return
    text = report.machine("A memory limit, kept by searches and by the training after them", ("mindspore", "numpy"))
    for name in options.networks:
        part = measure(name, options.batch or BATCHES[name], options.runs, options.limit)
        print(part, flush=True)
        text += f"\n\n{part}"
        report.keep(text + "\n", options.output or report.place("memory_limit"))


if __name__ == "__main__":
    main()
