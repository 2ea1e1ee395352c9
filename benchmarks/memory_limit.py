"""Checks with six networks whether a memory limit is kept: ``python -m benchmarks.memory_limit``.

Each program runs in a fresh process. This process watches its resident memory, together with that of its trial's
process; shared memory counts once. For each network:

* alone       training with micro-batches of each size, and nothing before it: the true peak. There are separate true
              peaks for ``micro_batch_size="auto"`` , which always accumulates, in two graphs, with each size given;
* predicted   the first of these peaks by `memory_report(measure=False)` , from one process. The peak of the process is
              compared, because the limit applies to it. The growth above the smallest size is a difference of two
              processes, each uncertain by 25 MB; it is compared if this is less than the allowed error;
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.targets import Target

ROOT = Path(__file__).resolve().parent.parent
BATCHES = {"unet": 32, "mlp": 16384, "cnn": 64, "transformer": 32, "embedding": 64, "dense": 512}
_UPDATES = 3
_LOOKS_EVERY = 0.02  # seconds
_OWN = ("Private_Clean", "Private_Dirty", "Pss_Shmem")  # the memory that a trial's process does not share
_APART = 0.02  # of a peak: the least difference of two neighbours with a limit between them
_PREDICTED_WITHIN = 0.15
_KEPT_WITHIN = 1.03  # of the limit, on a machine without other load
_COMPARED = 25e6 / _PREDICTED_WITHIN  # bytes: smaller growth is not compared


# -- the programs, each in a separate process --------------------------------------------------------------------------


def _program(kind: str, name: str, samples: int, number: int) -> dict[str, Any]:
    """`number` : the size for "alone" and "alone auto"; the limit for the others."""
    import mindspore as ms

    from benchmarks.memory_networks import CASES
    from gaccum_ms import (
        AutoSize,
        GradAccumulationCell,
        TrainOneStepWithGradAccumulationCell,
        find_micro_batch_size,
        memory_report,
    )
    from gaccum_ms.memory.heap import keep_heap_small

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    case = CASES[name]
    network, optimizer = case.make()
    batch = [ms.Tensor(value) for value in case.data(samples)]
    before = _peak()
    if kind == "report":
        found = memory_report(GradAccumulationCell(network, 2), optimizer, *batch, memory_limit=number, measure=False)
        return {"predicted": {row.micro_batch_size: row.peak for row in found.rows}, "probed": found.probed}
    size = number
    if kind == "find":
        size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch, number)
    if not kind.startswith("find"):
        keep_heap_small()  # as after a search
    options = {"micro_batch_size": AutoSize(number)} if "auto" in kind else {"micro_batch_size": size}
    cell = GradAccumulationCell(network, **options)
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    if kind == "alone auto":
        step._auto._begin(size)
    for _ in range(_UPDATES):
        step(*batch).asnumpy()
    return {"size": step.micro_batch_size, "peak": _peak(), "before": before}


def _peak() -> int:
    return _kilobytes("/proc/self/status", "VmHWM")


def _kilobytes(file: str, *names: str) -> int:
    """The sum of a /proc file's values of these names, in bytes."""
    found = re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024


# -- watching them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    answer: dict[str, Any]
    both: int  # the peak of the process and its trial's process together, in bytes
    seconds: float


def _watched(arguments: Sequence[Any], limit: float) -> Outcome:
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", **os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_memory_") as folder, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, __file__, "--program", json.dumps(arguments)]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
        both = 0
        try:
            while process.poll() is None:
                both = max(both, _together(process.pid))
                if time.monotonic() - start > limit:
                    raise TimeoutError(f"{arguments} took more than {limit} s")
                time.sleep(_LOOKS_EVERY)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{arguments}: " + "\n".join(lines[-20:]))
    return Outcome(json.loads(lines[-1]), both, time.monotonic() - start)


def _together(process: int) -> int:
    """Resident bytes of a process, plus the bytes of its children that they do not share with it. A process that ends
    is read slowly, up to 0.1 s, so this process is read before and after, and the smaller size counts."""
    own_file = f"/proc/{process}/status"
    try:
        before = _kilobytes(own_file, "VmRSS")
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        own = [_kilobytes(f"/proc/{child}/smaps_rollup", *_OWN) for child in children]
        return min(before, _kilobytes(own_file, "VmRSS")) + sum(own)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


# -- one network -------------------------------------------------------------------------------------------------------


def sizes_of(samples: int) -> list[int]:
    """The sizes whose peaks are compared with predictions, besides those of `neighbours` ."""
    return sorted({2, samples // 16})


def neighbours(samples: int) -> list[int]:
    """A quarter of the batch, half of it, all sizes between that divide it, and the whole batch."""
    numbers = {samples // 4, -(-samples // 3), samples // 2, samples}
    return sorted(numbers)


def limit_of(alone: dict[int, int], samples: int) -> int:
    """A limit midway between a quarter of the batch and half of it, or above all sizes if these need about the same."""
    quarter, half = alone[samples // 4], alone[samples // 2]
    return (quarter + half) // 2 if half - quarter > _APART * quarter else round(max(alone.values()) * (1 + _APART))


def _lines(name: str, runs: int, seconds: float, log: Any) -> list[str]:
    samples = BATCHES[name]
    alone: dict[str, dict[int, int]] = {"find": {}, "auto": {}}
    for way, kind in (("find", "alone"), ("auto", "alone auto")):
        for size in sorted({*neighbours(samples), *(sizes_of(samples) if way == "find" else ())}):
            alone[way][size] = _watched((kind, name, samples, size), seconds).answer["peak"]
            log(f"{name}: {kind}, {size} samples: {_mb(alone[way][size])}")
    predicted = _watched(("report", name, samples, 1 << 40), seconds).answer
    lines = [f"{name}, batch {samples}, predicted from {predicted['probed']} samples"]
    lines += ["", "samples  alone MB  predicted MB  predicted / alone  predicted growth / growth  auto alone MB"]
    targets = []
    for size, peak in sorted(alone["find"].items()):
        auto = _mb(alone["auto"][size]) if size in alone["auto"] else "-"
        expected = predicted["predicted"].get(str(size))
        if expected is None:  # no row of the report has this size
            lines.append(f"{size:7}  {_mb(peak):>8}  {'-':>12}  {'-':>17}  {'-':>25}  {auto:>13}")
            continue
        first = min(alone["find"])
        growth, expected_growth = peak - alone["find"][first], expected - predicted["predicted"][str(first)]
        ratio = f"{expected_growth / growth:.3f}" if growth > _COMPARED else "-"
        columns = f"{_mb(expected):>12}  {expected / peak:17.3f}  {ratio:>25}  {auto:>13}"
        lines.append(f"{size:7}  {_mb(peak):>8}  {columns}")
        compared = {"peak": expected / peak} | ({"growth": expected_growth / growth} if growth > _COMPARED else {})
        for what, ratio in compared.items():
            text = f"{name}: {what} at {size} samples, predicted off by"
            targets.append(Target(text, abs(ratio - 1), _PREDICTED_WITHIN))
    lines += ["", "way   limit MB  what fits  found  search's peak MB  training's peak MB  seconds"]
    for way, peaks in alone.items():
        limit = limit_of(peaks, samples)
        fits = max(size for size, peak in peaks.items() if peak <= limit)
        highest, found = [], []
        for _ in range(runs):
            outcome = _watched((way, name, samples, limit), seconds)
            found.append(outcome.answer["size"])
            highest.append(max(outcome.both, outcome.answer["peak"]))
            columns = (
                f"{found[-1]:5}  {_mb(outcome.both):>16}  {_mb(outcome.answer['peak']):>18}  {outcome.seconds:7.0f}"
            )
            lines.append(f"{way}  {_mb(limit):>8}  {fits:9}  {columns}")
            log(f"{name}: {lines[-1]}")
        text = f"{name}, {way}: the peak of both, search and training, of the limit"
        targets.append(Target(text, max(highest) / limit, _KEPT_WITHIN))
        targets.append(Target(f"{name}, {way}: what fits, over the least found", fits / min(found), 1 / 0.8))
        if runs > 1:
            text = f"{name}, {way}: sizes found in {runs} runs"
            targets.append(Target(text, len(set(found)), 2))
    return [*lines, "", *(target.line() for target in targets), ""]


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--runs", type=int, default=1, help="searches of each network and way (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds a program may take (default: 600)")
    parser.add_argument("--output", type=Path, help="file for the result (default: in benchmarks/results)")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(json.dumps(_program(*json.loads(options.program))))
        return
    text = report.machine("A memory limit, kept by searches and by the training after them", ("mindspore", "numpy"))
    output = options.output or report.place("memory_limit")
    for name in options.networks:
        lines = _lines(name, options.runs, options.limit, lambda text: print(text, file=sys.stderr, flush=True))
        print("\n".join(lines), flush=True)
        text += "\n\n" + "\n".join(lines)
        report.keep(text.rstrip() + "\n", output)
    print(f"kept in {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
