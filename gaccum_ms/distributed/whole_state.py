"""The whole state of a sharded optimizer, gathered temporarily from all ranks to be saved or loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.distributed.layout import Layout, gather_json

_NAME = "ShardedOptimizer"


class WholeState(nn.Cell):
    """The whole state; it temporarily replaces the inner optimizer."""

    def __init__(self, state: Sequence[ms.Parameter], sharded: Any) -> None:
        super().__init__(auto_prefix=False)
        common, divided, layout, names = _divided(state, sharded)
        with no_grad():
            wholes = layout.whole(divided)
        # In nested tuples, which Cells do not search for Parameters.
        self._common = tuple(
            (parameter, _copy(parameter.name, parameter), parameter.asnumpy().copy()) for parameter in common
        )
        self._divided = tuple(divided)
        self._layout = (layout,)
        self.values = ms.ParameterTuple(
            [copy for _, copy, _ in self._common]
            + [_copy(name, whole) for name, whole in zip(names, wholes, strict=True)]
        )

    def take_back(self) -> None:
        for parameter, _, before in self._common:
            if not np.array_equal(parameter.asnumpy(), before, equal_nan=True):
                raise RuntimeError(
                    f"For '{_NAME}', there must be no update within 'whole_state()', but got another "
                    f"'{parameter.name}' at its end. Nothing was taken from the whole state."
                )
        for parameter, copy, _ in self._common:
            overwrite(parameter, copy)
        parts = self._layout[0].own(self.values[len(self._common) :])
        for parameter, part in zip(self._divided, parts, strict=True):
            overwrite(parameter, part)

    def construct(self, *gradients):
        raise RuntimeError("For 'ShardedOptimizer', there must be no update within 'whole_state()'.")


def not_saved_alone(init_data: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replaces a Parameter's `init_data` , to refuse saving the state of one rank: nothing in the file would show that
    it is only a part. MindSpore calls `init_data` before it compiles a Cell and before it saves one.

    Only the call stack distinguishes a save from a compilation: MindSpore makes the same call for each Parameter from
    the outermost Cell, and calls no method of the inner Cells."""
    save = inspect.unwrap(ms.save_checkpoint).__code__  # since 2.8 in a wrapper, whose code other functions share
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is save:
            raise RuntimeError(
                f"For '{_NAME}', a checkpoint must hold the whole state, which all ranks put together, but one is "
                f"being saved by this rank alone. Save within 'with optimizer.whole_state():', which all ranks must "
                f"enter, whichever of them save; or give Model.train ModelCheckpoint or UpdateCheckpoint on all ranks, "
                f"and a GradAccumulationCell."
            )
        frame = frame.f_back
    return init_data(*args, **kwargs)


def _copy(name: str, value: ms.Tensor) -> ms.Parameter:
    return ms.Parameter(value.copy(), name=name, requires_grad=False, layerwise_parallel=True)


def _divided(state: Sequence[ms.Parameter], sharded: Any) -> Any:
    """Returns four things: the Parameters that all ranks have in common; this rank's others; the layout of the latter
    over ranks; and the names of the whole Parameters. A collective."""
    if sharded.sliced:
        common = [parameter for parameter in state if id(parameter) not in sharded.weight_of]
        divided = [parameter for parameter in state if id(parameter) in sharded.weight_of]
        shapes = [sharded.parameters[sharded.weight_of[id(parameter)]].shape for parameter in divided]
        like = [
            SimpleNamespace(shape=shape, dtype=parameter.dtype)
            for shape, parameter in zip(shapes, divided, strict=True)
        ]
        owners: list[int | None] = [None] * len(like)
        names = [parameter.name for parameter in divided]
    else:
        said = gather_json([(parameter.name, list(parameter.shape), str(parameter.dtype)) for parameter in state])
        everywhere = set.intersection(*({name for name, _, _ in those} for those in said))
        apart = [(rank, *what) for rank, those in enumerate(said) for what in those if what[0] not in everywhere]
        common = [parameter for parameter in state if parameter.name in everywhere]
        divided = [parameter for parameter in state if parameter.name not in everywhere]
        dtypes = {str(dtype): dtype for dtype in ms.common.dtype.number_type}
        like = [SimpleNamespace(shape=tuple(shape), dtype=dtypes[dtype]) for _, _, shape, dtype in apart]
        owners = [rank for rank, *_ in apart]
        names = [name for _, name, _, _ in apart]
    return common, divided, Layout(like, owners, sharded.rank, sharded.ranks), names
