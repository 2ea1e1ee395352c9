"""oneDNN's limit in each way to start training: ``instructions_worker.py OUT CASE...``.

Each case runs in a fork, in which no kernel has run before. It writes its output to ``OUT/CASE.txt``, and oneDNN's
limit, the variable and the warnings to ``OUT/CASE.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import gaccum_ms
from gaccum_ms import GradAccumulationCell, GradAccumulator
from gaccum_ms.cpu.instructions import VARIABLE
from tests.support.reference import make_step

BATCH = Tensor(np.ones((4, 3, 8, 8), np.float32)), Tensor(np.ones((4, 8 * 8 * 8), np.float32))


class Convolving(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.Flatten())

    def construct(self, x):
        return self.layers(x)


def cell_of(net: nn.Cell) -> GradAccumulationCell:
    return GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)


def optimizer_of(net: nn.Cell) -> nn.Optimizer:
    return nn.SGD(net.trainable_params(), 0.1)


def step_of(net: nn.Cell) -> nn.Cell:
    return make_step(nn.WithLossCell(net, nn.MSELoss()), micro_size=2)


def train() -> None:
    step_of(Convolving())(*BATCH).asnumpy()


def train_a_model_in_pynative_mode() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    net = Convolving()
    data_set = ms.dataset.NumpySlicesDataset(tuple(value.asnumpy() for value in BATCH)).batch(4)
    ms.Model(cell_of(net), optimizer=optimizer_of(net)).train(1, data_set)


def build_an_accumulator() -> None:
    GradAccumulator(optimizer_of(Convolving()), 2)


def tune() -> None:
    gaccum_ms.tune_cpu()


def tune_for_a_network_that_convolves() -> None:
    gaccum_ms.tune_cpu(network=Convolving())


def build_steps_that_do_not_convolve() -> None:
    net = nn.SequentialCell(nn.Flatten(), nn.Dense(192, 512))
    step_of(net)
    GradAccumulator(optimizer_of(net), 2)


def build_two_steps_too_late() -> None:
    ops.matmul(Tensor([[1.0]]), Tensor([[1.0]])).asnumpy()
    step_of(Convolving())
    step_of(Convolving())


def effective_isa() -> int:
    """oneDNN's instruction sets, with a bit for AVX-512. It is read last, because reading it fixes the limit."""
    (library,) = (Path(ms.__file__).parent / "lib").glob("libdnnl.so*")
    return ctypes.CDLL(str(library)).dnnl_get_effective_cpu_isa()


def run(case: str, out: Path) -> None:
    printed = os.open(out / f"{case}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[case]()
    said = [str(one.message) for one in caught]
    found = {
        "avx512": bool(effective_isa() & 0x20),
        "variable": os.environ.get(VARIABLE),
        "warnings": [message for message in said if VARIABLE in message],
    }
    (out / f"{case}.json").write_text(json.dumps(found))


def main(out: Path, cases: list[str]) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                run(case, out)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
