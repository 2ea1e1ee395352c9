"""Whether a memory limit is kept, by six networks: ``python -m benchmarks.memory_limit``.

Each program runs in a fresh process, which this one watches: its resident memory and that of its trial's process, where
shared memory counts once. Of each network:

* alone       training with micro-batches of each size, and nothing before it: the truth;
* predicted   the same by `memory_report(measure=False)` , from one process;
* searched    `find_micro_batch_size` and ``micro_batch_size="auto"`` in turn, under a limit that lies between two of
              the truths, each followed by training with what was found.
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
BATCHES = {"unet": 32, "mlp": 1024, "cnn": 64, "transformer": 32, "embedding": 64, "dense": 512}
_UPDATES = 3
_ABOVE = 1.02  # the limit, over the peak of the size that is to fit: trainings differ by less
_PREDICTED_WITHIN = 0.15
_SMALL = 50e6  # bytes of growth, below which what two processes differ by, up to 25 MB, is a large part of it


# -- the programs, each in a process of its own ------------------------------------------------------------------------


def _program(kind: str, name: str, samples: int, number: int) -> dict[str, Any]:
    """`number` : of "alone", the size; of the others, the limit."""
    import mindspore as ms

    from benchmarks.memory_networks import CASES
    from gaccum_ms import (
        GradAccumulationCell,
        TrainOneStepWithGradAccumulationCell,
        find_micro_batch_size,
        memory_report,
    )
    from gaccum_ms.memory.heap import give_back_freed_memory

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    case = CASES[name]
    network, optimizer = case.make()
    batch = [ms.Tensor(value) for value in case.data(samples)]
    before = _peak()
    if kind == "report":
        found = memory_report(GradAccumulationCell(network, 2), optimizer, *batch, memory_limit=number, measure=False)
        return {"predicted": {row.micro_batch_size: row.peak for row in found.rows}, "probed": found.probed}
    if kind == "auto":
        cell = GradAccumulationCell(network, micro_batch_size="auto", memory_limit=number)
    else:
        size = number
        if kind == "find":
            size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch, number)
        give_back_freed_memory()  # as the search has let it; here for training alone
        cell = GradAccumulationCell(network, micro_batch_size=size)
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    for _ in range(_UPDATES):
        step(*batch).asnumpy()
    return {"size": step.micro_batch_size, "peak": _peak(), "before": before}


def _peak() -> int:
    return _kilobytes("/proc/self/status", "VmHWM")


def _kilobytes(file: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


# -- what watches them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    answer: dict[str, Any]
    both: int  # bytes that the process and its trial's process have had together
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
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{arguments}: " + "\n".join(lines[-20:]))
    return Outcome(json.loads(lines[-1]), both, time.monotonic() - start)


def _together(process: int) -> int:
    """Resident bytes of a process, and of its children what they do not share with it."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        own = [_kilobytes(f"/proc/{child}/smaps_rollup", "Private_Dirty") for child in children]
        return _kilobytes(f"/proc/{process}/status", "VmRSS") + sum(own)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


# -- one network -------------------------------------------------------------------------------------------------------


def sizes_of(samples: int) -> list[int]:
    """Whose truth is measured: by fours, down to a 64th of the batch, and two samples."""
    by_fours = {samples // 4**power for power in range(4) if samples >= 4**power}
    return sorted(by_fours | ({2} if samples <= 64 else set()))


def _lines(name: str, runs: int, limit: float, log: Any) -> list[str]:
    samples = BATCHES[name]
    sizes = sizes_of(samples)
    alone = {}
    for size in sizes:
        alone[size] = _watched(("alone", name, samples, size), limit).answer["peak"]
        log(f"{name}: alone, {size} samples: {_mb(alone[size])}")
    predicted = _watched(("report", name, samples, 1 << 40), limit).answer
    lines = [f"{name}, batch {samples}, predicted from {predicted['probed']} samples"]
    lines.append("samples  alone MB  predicted MB  predicted / alone  predicted growth / growth")
    targets = []
    for size in sizes:
        expected = predicted["predicted"][str(size)]
        growth, expected_growth = alone[size] - alone[sizes[0]], expected - predicted["predicted"][str(sizes[0])]
        ratio = f"{expected_growth / growth:.3f}" if growth > _SMALL else "-"
        lines.append(
            f"{size:7}  {_mb(alone[size]):>8}  {_mb(expected):>12}  {expected / alone[size]:17.3f}  {ratio:>24}"
        )
        if growth > _SMALL:
            error = abs(expected_growth / growth - 1)
            targets.append(Target(f"{name}: growth to {size} samples, predicted off by", error, _PREDICTED_WITHIN))
        targets.append(
            Target(f"{name}: peak at {size} samples, predicted off by", abs(expected / alone[size] - 1), 0.15)
        )
    fitting = sizes[-2]
    allowed = round(alone[fitting] * _ABOVE)
    truth = max(size for size in sizes if alone[size] <= allowed)
    lines.append(f"limit {_mb(allowed)} MB: {truth} samples fit")
    lines.append("way   found  search's peak MB  training's peak MB  seconds")
    found = []
    for run in range(runs):
        kind = ("find", "auto")[run % 2]
        outcome = _watched((kind, name, samples, allowed), limit)
        size = outcome.answer["size"]
        found += [size] * (kind == "find")  # "auto" accumulates a batch that fits whole too, and has another truth
        peaks = outcome.both, outcome.answer["peak"]
        lines.append(f"{kind}  {size:5}  {_mb(peaks[0]):>16}  {_mb(peaks[1]):>18}  {outcome.seconds:7.0f}")
        log(f"{name}: {lines[-1]}")
        targets.append(Target(f"{name}: the peak of both, search and training, of the limit", max(peaks) / allowed, 1))
    targets.append(Target(f"{name}: what fits, over the least found", truth / min(found), 1 / 0.8))
    return [*lines, *(target.line() for target in targets), ""]


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--runs", type=int, default=10, help="searches of each network (default: 10)")
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
