"""One of the ranks of ranks.py: runs the requested cases, one after another.

It is started by ``python -m gaccum_ms.launch -n 2 rank_that_stays.py FOLDER PID``. Requests are files in the folder;
the rank ends when the process PID is gone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import psutil
from mindspore import ops
from mindspore.communication import get_rank, init

from tests.support import environment
from tests.support.device import DEVICE


def request(file: Path, asking: int) -> dict[str, str] | None:
    """The next request; None if there will be none."""
    while not file.exists():
        if not psutil.pid_exists(asking):
            return None
        time.sleep(0.02)
    return json.loads(file.read_text())


def main(folder: Path, asking: int) -> None:
    ms.set_device(DEVICE)
    environment.of_graphs()
    launched = "MS_ROLE" in os.environ
    if launched:
        init()
    rank, number = get_rank() if launched else 0, 0
    gc.collect()
    gc.freeze()  # MindSpore collects garbage at each compilation; present objects are excluded
    while asked := request(folder / f"{number}.json", asking):
        ms.set_context(mode=ms.GRAPH_MODE)
        if launched:
            ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, parameter_broadcast=False)
        print(asked["module"], asked["case"], flush=True)
        results = importlib.import_module(asked["module"]).CASES[asked["case"]](Path(asked["out"]))
        new = folder / f"{number}.{rank}.new.npz"
        np.savez(new, **results)
        new.rename(folder / f"{number}.{rank}.npz")
        ms.ms_memory_recycle()
        number += 1
    if launched:  # a rank that leaves first breaks the others' last collective
        ops.AllReduce()(ms.Tensor([1.0])).asnumpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
