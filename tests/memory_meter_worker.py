"""Measures 100 MB in blocks of the size that is asked for. Run by tests/test_memory_meter.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from two_ranks import leave

from gaccum_ms.memory_meter import ProcessMeter


def main(out: Path, size: int) -> None:
    meter = ProcessMeter()
    number = 100_000_000 // size

    def run() -> None:
        held = [np.ones(size, np.uint8) for _ in range(number)]
        assert len(held) == number

    nothing = meter.used_by(lambda: None)
    run()
    before = meter.held()
    used = meter.used_by(run) - nothing
    results = {"used": used, "expected": number * size, "grown": meter.held() - before}
    leave(out, 0, {name: np.array(value) for name, value in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
