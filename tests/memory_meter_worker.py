"""Measures a small run before and after much became resident, and 100 MB in blocks of the size that is asked for. Run
by tests/test_memory_meter.py."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
from two_ranks import Results, leave

from gaccum_ms.memory.meter import ProcessMeter

MB = 1_000_000


def beside_others(meter: ProcessMeter) -> Results:
    def touch(size: int = mmap.PAGESIZE) -> None:
        np.ones(size, np.uint8).sum()

    def used() -> int:
        """On a busy machine a run takes long enough for MindSpore's other threads to use some MB meanwhile."""
        return min(meter.used_by(touch) for _ in range(5))

    before = used()
    touch(300 * MB)
    kept = np.ones(100 * MB, np.uint8)  # resident, and not used by the run
    after = used()
    assert kept[0] == 1
    return {"before": np.array(before), "after": np.array(after)}


def used_again(meter: ProcessMeter, size: int) -> Results:
    number = 100 * MB // size

    def run() -> None:
        held = [np.ones(size, np.uint8) for _ in range(number)]
        assert len(held) == number

    nothing = meter.used_by(lambda: None)
    run()
    before = meter.held()
    used = meter.used_by(run) - nothing
    results = {"used": used, "expected": number * size, "grown": meter.held() - before}
    return {name: np.array(value) for name, value in results.items()}


def main(out: Path, size: int) -> None:
    meter = ProcessMeter()
    leave(out, 0, beside_others(meter) | used_again(meter, size))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
