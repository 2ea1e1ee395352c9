"""Steps that are compiled once for many tests: compiling takes a second, and only the data differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops


class Reused:
    """Calls `make` once for each mode and arguments. Each call returns this step with its initial Parameters.

    ``ops.assign`` restores them, because a compiled graph may not see values that are written in another way.
    """

    def __init__(self, make: Callable[..., nn.Cell]) -> None:
        self.make = make
        self.made: dict[Any, tuple[nn.Cell, list[Tensor]]] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        key = (ms.get_context("mode"), arguments, *sorted(options.items()))
        if key not in self.made:
            step = self.make(*arguments, **options)
            self.made[key] = step, [Tensor(one.asnumpy().copy(), one.dtype) for one in step.get_parameters()]
        step, values = self.made[key]
        for parameter, value in zip(step.get_parameters(), values, strict=True):
            ops.assign(parameter, value)
        return step
