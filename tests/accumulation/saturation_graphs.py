"""Compiles steps for a device that saturates: ``saturation_graphs.py OUT``.

The compiler finishes each graph and then fails, because the CPU has no operators for the flag. The finished graphs are
written to ``OUT/CASE.ir`` .
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import mindspore as ms
from mindspore import amp, nn, ops

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell, backend
from gaccum_ms.accumulation import accumulators
from gaccum_ms.cpu import kernels
from tests.support.saturating import yes

CASES = {
    "clipping": {"micro_size": 4, "max_grad_norm": 1.0},
    "dropping": {"micro_size": 4, "overflow": "drop_micro_batch"},
    "several batches": {"micro_size": 4, "accumulation_steps": 2},
    "window's end": {"micro_size": 4, "accumulation_steps": 2},
    "loop": {},
}


@ops.constexpr
def no():
    return False


def compile_case(name: str) -> None:
    net = nn.Dense(3, 2)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    scale = ms.Tensor(2.0)
    if name == "loop":
        run = GradAccumulator(optimizer, 2, scale_sense=scale)
        run.scale(ms.Tensor(1.0))  # the accumulator requires scaled losses
        run(tuple(ops.ones_like(weight) for weight in net.trainable_params()))
        return
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), **CASES[name])
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer, scale).set_train()
    if name == "window's end":
        step.end_window.run_alone(ms.Tensor(0.0))
    step(ops.ones((8, 3)), ops.ones((8, 2)))


def main(out: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    graphs, seen = Path(os.environ["MS_DEV_SAVE_GRAPHS_PATH"]), set()
    for name in CASES:
        amp._ascend_target = amp._ascend_910a_target = yes  # MindSpore's own ...
        backend.ascend_target = backend.ascend_910a_target = yes  # ... and ours
        kernels.on_cpu = accumulators.on_cpu = no
        message = "compiled"
        try:
            compile_case(name)
        except Exception as error:
            message = str(error)
        (out / f"{name}.txt").write_text(message)
        new = set(graphs.glob("**/*_validate_*.ir")) - seen
        seen |= new
        shutil.copy(max(new, key=lambda one: one.stat().st_mtime_ns), out / f"{name}.ir")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
