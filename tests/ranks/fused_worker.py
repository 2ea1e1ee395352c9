"""The cases of test_all_reduce.py on ranks (support/ranks.py): reductions with buffers so small that every kind of
buffer occurs, and the collectives that run in an update."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from gaccum_ms.distributed import all_reduce as fused_reduction
from tests.ranks.cases import set_up
from tests.support.reference import Regression, as_numpy, batches, make_step
from tests.support.two_ranks import Results

LIMIT = 100  # bytes: one of the network's two gradients has 384, the other 32


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
    "all small": Gradients([(2, 3), (), (4,), (1, 1, 2)], ((0, 1, 2, 3),)),
    "large between small": Gradients([(2, 3), (5, 6), (4,), (30,), ()], ((1,), (3,), (0, 2, 4))),
    "several buffers": Gradients([(10,), (14,), (2,), (20,), (4,)], ((0, 1), (2, 3), (4,))),
    "dtypes": Gradients([(4, 3), (2,), (5,), (3,), (50,), (60,)], ((4,), (5,), (0, 1, 2, 3)), MIXED),
    "own": Gradients([(3,), (40,), (4,), (50,), (5,)], ((1,), (2, 4)), own=(0, 3)),
}


SUM = "sum of dtypes"  # the only reduction that is not a mean
REDUCED = {**{name: (kind, True) for name, kind in KINDS.items()}, SUM: (KINDS["dtypes"], False)}


def reduce(rank: int) -> Results:
    """The results of our reducer, rounded to the gradients' dtypes, and of MindSpore's reducer for the same gradients,
    of all kinds. Rank 1 has a NaN and an infinity then."""
    results: Results = {}
    for name, (kind, mean) in REDUCED.items():
        weights, gradients = kind.weights(), tuple(kind.of_rank(rank))
        ours = fused_reduction.FusedReducer(weights, mean, get_group_size())
        reduced = {name: (ours, gradients)}
        reduced[f"{name}, MindSpore's"] = nn.DistributedGradReducer(weights, mean, get_group_size()), gradients
        if name == "all small":
            poisoned = list(gradients)
            if rank == 1:
                infinite = gradients[2].asnumpy()
                infinite[1] = np.inf
                poisoned[1:3] = Tensor(gradients[1].asnumpy() * np.nan), Tensor(infinite)
            reduced[f"poisoned, {name}"] = ours, tuple(poisoned)
        for key, (reducer, given) in reduced.items():
            found = reducer(given)
            assert [one.shape for one in found] == [one.shape for one in given]
            if reducer is ours:
                sent = [number not in kind.own for number in range(len(given))]
                dtypes = [ms.float32 if one else like.dtype for one, like in zip(sent, given, strict=True)]
                assert [one.dtype for one in found] == dtypes
            rounded = [one.astype(like.dtype).astype(ms.float64) for one, like in zip(found, given, strict=True)]
            results |= {f"{key}/{number}": as_numpy(one) for number, one in enumerate(rounded)}
    return results


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


def collectives(rank: int, out: Path) -> Results:
    """The collectives that run in a compiled update of four micro-batches."""
    step = make_step(Regression(), micro_size=4)
    batch = [Tensor(value) for value in batches(8, 1, seed=rank)[0]]
    step(*batch)  # compiles
    return {"collectives": np.array(executed_all_reduces(lambda: step(*batch).asnumpy(), out / f"profile-{rank}"))}


# -- all cases ---------------------------------------------------------------------------------------------------------


def as_case(task: Callable[..., Results], mode: str, files: bool = False) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        set_up(mode)
        large, fused_reduction.BUFFER_BYTES = fused_reduction.BUFFER_BYTES, LIMIT
        try:
            return task(get_rank(), *([out] if files else []))
        finally:
            fused_reduction.BUFFER_BYTES = large

    return case


CASES: dict[str, Callable[[Path], Results]] = {
    **dict.fromkeys(
        (*REDUCED, *(f"{name}, MindSpore's" for name in REDUCED), "poisoned, all small"), as_case(reduce, "pynative")
    ),
    "collectives": as_case(collectives, "graph", files=True),
}
