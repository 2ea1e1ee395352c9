"""The whole state of an optimizer that is sharded, put together from all ranks for a while: to be saved or loaded."""

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
    """The whole state, in the place of the inner optimizer."""

    def __init__(self, state: Sequence[ms.Parameter], sharded: Any) -> None:
        super().__init__(auto_prefix=False)
        common, divided, layout, names = _divided(state, sharded)
        with no_grad():
            wholes = layout.whole(divided)
        # In tuples of pairs, which Cells do not look into.
        self._common = tuple((one, _copy(one.name, one), one.asnumpy().copy()) for one in common)
        self._divided = tuple(divided)
        self._layout = (layout,)
        self.values = ms.ParameterTuple(
            [copy for _, copy, _ in self._common]
            + [_copy(name, whole) for name, whole in zip(names, wholes, strict=True)]
        )

    def take_back(self) -> None:
        for one, _, before in self._common:
            if not np.array_equal(one.asnumpy(), before, equal_nan=True):
                raise RuntimeError(
                    f"For '{_NAME}', there must be no update within 'whole_state()', but got another '{one.name}' at "
                    f"its end. Nothing was taken from the whole state."
                )
        for one, copy, _ in self._common:
            overwrite(one, copy)
        parts = self._layout[0].own(self.values[len(self._common) :])
        for one, part in zip(self._divided, parts, strict=True):
            overwrite(one, part)

    def construct(self, *gradients):
        raise RuntimeError("For 'ShardedOptimizer', there must be no update within 'whole_state()'.")


def not_saved_alone(init_data: Callable, *args: Any, **kwargs: Any) -> Any:
    """In the place of a Parameter's `init_data` , which MindSpore calls before it compiles a Cell, and before it saves
    one: a file with the state of one rank would say nothing of being just a part.

    It looks at the stack, because nothing else tells a save from a compilation: MindSpore makes the same call of each
    Parameter, from the outermost Cell, and asks no Cell within it."""
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
    """What of a rank's state all ranks have alike; its other Parameters; how the whole of these is divided among ranks;
    and its names. A collective."""
    if sharded.sliced:
        common = [one for one in state if id(one) not in sharded._weight_of]
        divided = [one for one in state if id(one) in sharded._weight_of]
        shapes = [sharded.parameters[sharded._weight_of[id(one)]].shape for one in divided]
        like = [SimpleNamespace(shape=shape, dtype=one.dtype) for shape, one in zip(shapes, divided, strict=True)]
        owners: list[int | None] = [None] * len(like)
        names = [one.name for one in divided]
    else:
        said = gather_json([(one.name, list(one.shape), str(one.dtype)) for one in state])
        everywhere = set.intersection(*({name for name, _, _ in those} for those in said))
        apart = [(rank, *what) for rank, those in enumerate(said) for what in those if what[0] not in everywhere]
        common = [one for one in state if one.name in everywhere]
        divided = [one for one in state if one.name not in everywhere]
        dtypes = {str(dtype): dtype for dtype in ms.common.dtype.number_type}
        like = [SimpleNamespace(shape=tuple(shape), dtype=dtypes[dtype]) for _, _, shape, dtype in apart]
        owners = [rank for rank, *_ in apart]
        names = [name for _, name, _, _ in apart]
    return common, divided, Layout(like, owners, sharded.rank, sharded.ranks), names
