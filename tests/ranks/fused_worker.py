"""The cases of test_all_reduce.py on ranks (support/ranks.py): reductions and trainings with buffers so small that
every kind of buffer occurs. MindSpore saves its finished graphs.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from gaccum_ms.distributed import all_reduce as fused_reduction
from tests.support.modes import MODES
from tests.support.reference import as_numpy, batches, make_network, make_step
from tests.support.two_ranks import Results

LIMIT = 100  # bytes: of the network "dense", 768 and 320 are sent alone, 64 and 20 together
COLLECTIVES, BYTES = 3, 768 + 320 + 64 + 20
SAMPLES = 16
_SIZES = {"Float32": 4, "Float16": 2, "BFloat16": 2}  # bytes


class Gradients(NamedTuple):
    """Shapes and dtypes, the indices of the rank's own, and the expected buffers for a limit of 100 bytes."""

    shapes: Sequence[tuple[int, ...]]
    buffers: tuple[tuple[int, ...], ...]
    dtypes: Sequence[Any] = ()
    own: Sequence[int] = ()

    def weights(self) -> list[ms.Parameter]:
        dtypes = self.dtypes or [ms.float32] * len(self.shapes)
        return [
            ms.Parameter(Tensor(np.zeros(shape), dtype), name=f"weight{number}", layerwise_parallel=number in self.own)
            for number, (shape, dtype) in enumerate(zip(self.shapes, dtypes, strict=True))
        ]

    def of_rank(self, rank: int) -> list[Tensor]:
        random = np.random.default_rng(rank)
        return [Tensor(random.normal(size=one.shape), one.dtype) for one in self.weights()]


MIXED = (ms.float16, ms.float32, ms.bfloat16, ms.float64, ms.float16, ms.bfloat16)
KINDS = {
    "one": Gradients([(2, 3)], ((0,),)),
    "scalar": Gradients([()], ((0,),)),
    "all large": Gradients([(5, 5), (26,)], ((0,), (1,))),
    "all small": Gradients([(2, 3), (), (4,), (1, 1, 2)], ((0, 1, 2, 3),)),
    "large between small": Gradients([(2, 3), (5, 6), (4,), (30,), ()], ((1,), (3,), (0, 2, 4))),
    "several buffers": Gradients([(10,), (14,), (2,), (20,), (4,)], ((0, 1), (2, 3), (4,))),
    "dtypes": Gradients([(4, 3), (2,), (5,), (3,), (50,), (60,)], ((4,), (5,), (0, 1, 2, 3)), MIXED),
    "own": Gradients([(3,), (40,), (4,), (50,), (5,)], ((1,), (2, 4)), own=(0, 3)),
    "nothing but own": Gradients([(3,), (40,)], (), own=(0, 1)),
}


SUM = "sum of dtypes"  # the only reduction that is not a mean
REDUCED = {**{name: (kind, True) for name, kind in KINDS.items()}, SUM: (KINDS["dtypes"], False)}


class Reducers(nn.Cell):
    """Calls reducers, each with its number of gradients. All are in one graph, which takes little longer to compile
    than one."""

    def __init__(self, reducers: list[nn.Cell], numbers: list[int]) -> None:
        super().__init__(auto_prefix=False)
        self.reducers = nn.CellList(reducers)
        self.ends = tuple(accumulate(numbers))
        self.starts = (0, *self.ends[:-1])

    def construct(self, *gradients):
        results = ()
        for number, reducer in enumerate(self.reducers):
            part = gradients[self.starts[number] : self.ends[number]]
            if number > 0:  # in the same order on all ranks
                part = ops.depend(part, results)
            results = results + reducer(part)
        return results


def reduce(mode: str, rank: int) -> Results:
    """The results of our reducer, rounded to the gradients' dtypes, and of MindSpore's reducer for the same gradients,
    of all kinds."""
    reducers, keys, gradients, numbers, dtypes = [], [], [], [], []
    for name, (kind, mean) in REDUCED.items():
        weights = kind.weights()
        for whose, reducer in (("ours", fused_reduction.FusedReducer), ("MindSpore's", nn.DistributedGradReducer)):
            reducers.append(reducer(weights, mean, get_group_size()))
            keys += [f"{name}, {mode}/{whose}/{number}" for number in range(len(weights))]
            numbers.append(len(weights))
            gradients += kind.of_rank(rank)
            is_ours = whose == "ours"
            dtypes += [
                ms.float32 if is_ours and number not in kind.own else weight.dtype
                for number, weight in enumerate(weights)
            ]
    cell = Reducers(reducers, numbers)

    def results() -> Results:
        reduced = cell(*gradients)
        assert [one.shape for one in reduced] == [one.shape for one in gradients]
        assert [one.dtype for one in reduced] == dtypes
        rounded = [one.astype(like.dtype) for one, like in zip(reduced, gradients, strict=True)]
        return {key: as_numpy(one.astype(ms.float64)) for key, one in zip(keys, rounded, strict=True)}

    all_results = results()
    if rank == 1:
        place = keys.index(f"all small, {mode}/ours/0")
        nan, infinite = gradients[place + 1].asnumpy() * np.nan, gradients[place + 2].asnumpy()
        infinite[1] = np.inf
        gradients[place + 1 : place + 3] = map(Tensor, (nan, infinite))
    return all_results | {f"poisoned, {key}": value for key, value in results().items()}


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
    """The finished graphs that MindSpore saves as it compiles, in a process whose environment asks for them."""

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
                yield _SIZES[dtype] * int(np.prod([int(length) for length in shape.split(",") if length.strip()]))


def step_by(micro_size: int, accumulation_steps: int = 1) -> nn.Cell:
    loss_cell = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    options = {"micro_size": micro_size, "accumulation_steps": accumulation_steps}
    return make_step(loss_cell, lambda weights: nn.Momentum(weights, 0.01, 0.9), **options)


def sent_per_update(step: nn.Cell, batch: Sequence[Any], steps: int, graphs: Graphs, folder: Path) -> dict[str, Any]:
    """Collectives and bytes of an update of `steps` batches."""

    def update() -> None:
        for _ in range(steps):
            step(*batch).asnumpy()

    update()  # compiles
    in_graph = graphs.all_reduces()
    return {"executed": executed_all_reduces(update, folder), "in_graph": len(in_graph), "bytes": sum(in_graph)}


def data_of(rank: int) -> tuple[Tensor, ...]:
    return tuple(map(Tensor, batches(SAMPLES, 1, seed=rank)[0]))


def mindspores_reducer() -> nn.Cell:
    step = step_by(4)
    step.window.ledger.grad_reducer = nn.DistributedGradReducer(step.weights, True, get_group_size())
    return step


PROGRAMS: dict[str, tuple[Callable[[], nn.Cell], int]] = {  # how the step is made, and the batches of an update
    "4 1": (lambda: step_by(4), 1),
    "16 4": (lambda: step_by(16, 4), 4),
    "control: MindSpore's reducer": (mindspores_reducer, 1),
}


def collectives(name: str, rank: int, out: Path) -> dict[str, np.ndarray]:
    """Collectives that ran in an update, those in its graph, and their bytes."""
    make, steps = PROGRAMS[name]
    folder = out / f"profile-{rank}-{list(PROGRAMS).index(name)}"
    sent = sent_per_update(make(), data_of(rank), steps, Graphs(), folder)
    return {f"collectives {name}": np.array([sent["executed"], sent["in_graph"], sent["bytes"]])}


# -- all cases ---------------------------------------------------------------------------------------------------------


def as_case(task: Callable[..., Results], *arguments: Any, mode: str = "graph", files: bool = False) -> Callable:
    def case(out: Path) -> Results:
        ms.set_context(mode=MODES[mode])
        large, fused_reduction.BUFFER_BYTES = fused_reduction.BUFFER_BYTES, LIMIT
        try:
            return task(*arguments, get_rank(), *([out] if files else []))
        finally:
            fused_reduction.BUFFER_BYTES = large

    return case


CASES: dict[str, Callable[[Path], Results]] = {
    f"collectives {name}": as_case(collectives, name, files=True) for name in PROGRAMS
}
for mode in MODES:
    names = [f"{name}, {mode}" for name in REDUCED]
    CASES |= dict.fromkeys([*names, f"poisoned, all small, {mode}"], as_case(reduce, mode, mode=mode))
