"""One rank of ``python -m benchmarks.collectives``: counts its communication, and times single reductions."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from benchmarks.collectives import LARGE, torch_buckets
from benchmarks.networks import CLASSES, NETWORKS
from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.distributed import all_reduce as fused_reduction

BATCH = 16
LIMITS = {"one by one": 0, "1 MB": 2**20, "4 MB": 4 * 2**20, "16 MB": 16 * 2**20, "64 MB": 64 * 2**20}
_SMALL_WIDTH = 32
_BYTES = {"Float32": 4, "Float16": 2, "BFloat16": 2}


# -- counting ----------------------------------------------------------------------------------------------------------


def executed_all_reduces(call: Callable[[], Any], folder: Path) -> int:
    """The number of AllReduce kernels in the call, according to MindSpore's profiler."""
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(str(folder))):
        call()
    (table,) = folder.glob("**/cpu_op_type_info_*.csv")
    with table.open() as file:
        kernels = {row["op_type"]: int(row["type_occurrences"]) for row in csv.DictReader(file)}
    assert kernels.get("MatMul"), kernels  # the profiler has recorded the call
    return kernels.get("AllReduce", 0)


class Graphs:
    """The finished graphs that MindSpore saves as it compiles."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["MS_DEV_SAVE_GRAPHS_PATH"], f"rank_{get_rank()}")
        self.seen: set[Path] = set()
        self.all_reduces()

    def all_reduces(self) -> list[int]:
        """The bytes of each AllReduce in the graphs saved since the last call."""
        new = set(self.folder.glob("*_validate_*.ir")) - self.seen
        self.seen |= new
        return [one for file in new for one in self._sizes(file.read_text())]

    @staticmethod
    def _sizes(text: str) -> Iterator[int]:
        for line, types in pairwise(text.splitlines()):
            if " = AllReduce(" in line:
                dtype, shape = re.match(r"\s*: \(<Tensor\[(\w+)\], \(([\d, ]*)\)", types).groups()
                yield _BYTES[dtype] * int(np.prod([int(length) for length in shape.split(",") if length.strip()]))


def _small_network() -> nn.Cell:
    layers: list[nn.Cell] = []
    for _ in range(30):
        layers += [nn.Dense(_SMALL_WIDTH, _SMALL_WIDTH), nn.ReLU()]
    return nn.SequentialCell(layers[:-1])


# Title, features of a sample, and a function that makes the network.
_COUNTED: dict[str, tuple[str, int, Callable[[], nn.Cell]]] = {
    "mlp": (NETWORKS["mlp"].title, NETWORKS["mlp"].sample_shape[0], NETWORKS["mlp"].mindspore),
    "small": ("30 layers of 32 x 32", _SMALL_WIDTH, _small_network),
}


def make_step(network: nn.Cell, micro_size: int | None, accumulation_steps: int) -> nn.Cell:
    """Ours; without a `micro_size` , MindSpore's."""
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
    if micro_size is None:
        return nn.TrainOneStepCell(loss_cell, optimizer).set_train()
    cell = GradAccumulationCell(loss_cell, micro_size, accumulation_steps=accumulation_steps)
    return TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()


def sent_per_update(step: nn.Cell, batch: Sequence[Any], steps: int, graphs: Graphs, folder: Path) -> dict[str, Any]:
    """Collectives and bytes of an update of `steps` batches."""

    def update() -> None:
        for _ in range(steps):
            step(*batch).asnumpy()

    update()  # compiles
    in_graph = graphs.all_reduces()
    return {"executed": executed_all_reduces(update, folder), "in_graph": len(in_graph), "bytes": sum(in_graph)}


def count(
    out: Path, networks: Sequence[str], micro_sizes: Sequence[int], accumulation_steps: Sequence[int]
) -> list[dict[str, Any]]:
    graphs, rows = Graphs(), []
    for name in networks:
        title, features, make_network = _COUNTED[name]
        random = np.random.default_rng(get_rank())
        inputs = ms.Tensor(random.normal(size=(BATCH, features)), ms.float32)
        labels = ms.Tensor(random.integers(0, CLASSES, BATCH), ms.int32)
        for micro_size, steps in [(None, 1), *((one, k) for k in accumulation_steps for one in micro_sizes)]:
            network = make_network()
            folder = out / f"profile-{get_rank()}-{len(rows)}"
            sent = sent_per_update(make_step(network, micro_size, steps), (inputs, labels), steps, graphs, folder)
            row = {"network": title, "parameters": len(network.trainable_params()), "ours": micro_size is not None}
            rows.append({**row, "micro_size": micro_size or 1, "accumulation_steps": steps, **sent})
    return rows


# -- timing ------------------------------------------------------------------------------------------------------------

_TIMED: dict[str, list[tuple[int, ...]]] = {
    "60 gradients of 4 KB and 128 bytes": [(32, 32), (32,)] * 30,
    f"mlp {NETWORKS['mlp'].title}": [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)],
    "80 gradients of 256 KB and 1 KB": [(256, 256), (256,)] * 40,
    "32 gradients of 4 MB and 4 KB": [(1024, 1024), (1024,)] * 16,
}


class Reduction(nn.Cell):
    """Creates gradients, reduces them, and adds them up, as an optimizer would."""

    def __init__(self, weights: Sequence[ms.Parameter], reducer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.weights = ms.ParameterTuple(weights)
        self.sums = self.weights.clone("sums", "zeros")
        self.reducer = reducer
        self.map = ops.HyperMap()

    def construct(self, factor):
        reduced = self.reducer(self.map(ops.partial(ops.mul, factor), self.weights))
        return ops.depend(factor, self.map(ops.assign_add, self.sums, reduced))


def _reducers(weights: Sequence[ms.Parameter]) -> Iterator[tuple[str, int, nn.Cell]]:
    """Name, number of collectives, and reducer."""
    yield "MindSpore's, one by one", len(weights), nn.DistributedGradReducer(weights, False, get_group_size())
    for name, limit in LIMITS.items():
        fused_reduction.BUFFER_BYTES = limit
        reducer = fused_reduction.FusedReducer(weights, False, get_group_size())
        yield f"ours, {name}", len(reducer.alone) + len(reducer.shared), reducer


def time_reductions(rounds: int) -> list[dict[str, Any]]:
    """Times all reducers of the same gradients in turns, so that a slow minute of the machine affects all of them."""
    rows, factor, meet = [], ms.Tensor(1.0, ms.float32), ops.AllReduce()
    for name, shapes in _TIMED.items():
        random = np.random.default_rng(0)
        weights = [
            ms.Parameter(random.normal(size=shape).astype(np.float32), name=f"weight{number}")
            for number, shape in enumerate(shapes)
        ]
        programs = [(label, number, Reduction(weights, reducer)) for label, number, reducer in _reducers(weights)]
        own = [
            {"gradients": name, "reducer": label, "collectives": number, "seconds": []} for label, number, _ in programs
        ]
        for turn in range(rounds + 1):
            for row, (_, _, program) in zip(own, programs, strict=True):
                meet(ms.Tensor([1.0])).asnumpy()
                start = time.perf_counter()
                program(factor).asnumpy()
                if turn:  # the first compiles
                    row["seconds"].append(time.perf_counter() - start)
        rows += own
    return rows


# -- planning ----------------------------------------------------------------------------------------------------------


def plan() -> list[dict[str, Any]]:
    """Collectives of a large model's gradients, and the bytes that are copied into shared buffers."""
    notes = {fused_reduction.BUFFER_BYTES: "CPU", fused_reduction.DEVICE_BUFFER_BYTES: "GPU and Ascend"}
    rows = []
    for model, numbers in LARGE.items():
        sizes = [4 * number for number in numbers]
        for limit in sorted({*LIMITS.values(), *notes}):
            buffers = fused_reduction.plan_buffers(sizes, limit)
            copied = sum(sizes[place] for buffer in buffers if len(buffer) > 1 for place in buffer)
            row = {"model": model, "limit": limit, "collectives": len(buffers), "copied": copied}
            rows.append({**row, "note": notes.get(limit, "")})
        theirs = {"model": f"{model}, PyTorch", "limit": fused_reduction.DEVICE_BUFFER_BYTES, "copied": sum(sizes)}
        rows.append({**theirs, "collectives": torch_buckets(sizes, theirs["limit"]), "note": "its default"})
    return rows


def main(out: Path, networks: list[str], micro_sizes: list[int], accumulation_steps: list[int], rounds: int) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    counts = count(out, networks, micro_sizes, accumulation_steps)
    result = [counts, time_reductions(rounds) if rounds else [], plan()]
    (out / f"rank{get_rank()}.json").write_text(json.dumps(result))
    ops.AllReduce()(ms.Tensor([1.0])).asnumpy()  # a rank that leaves first breaks the others' last collective


if __name__ == "__main__":
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
