"""The accumulators: one Parameter for each weight, in which the gradients of a window are added up.

A float16 or bfloat16 accumulator loses every gradient that is smaller than half a unit in its last place. Compensated
summation (Kahan, "Further remarks on reducing truncation errors", CACM 1965) keeps what rounding took away in a second
Parameter and adds it again. The compensation is float32: in the accumulator's own dtype it would round in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import initializer

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.parameters import of_this_rank, on_cpu, write
from gaccum_ms.cpu.kernels import add_in_place, zero_in_place

PREFIX = "accu_grads."
COMPENSATION_PREFIX = "accu_compensation."


def allocate(weights: Sequence[ms.Parameter], dtype: ms.Type | None, prefix: str) -> ms.ParameterTuple:
    """Zero accumulators named after their weights (``accu_grads.<weight>``), not trainable. With None, each has its
    weight's dtype."""
    return ms.ParameterTuple(
        [
            of_this_rank(prefix + weight.name, initializer("zeros", weight.shape, dtype or weight.dtype))
            for weight in weights
        ]
    )


# -- compiled ----------------------------------------------------------------------------------------------------------
# In a compiled graph, the framework orders reads and writes of one Parameter; ops.depend orders those of several.
# Callers use the returned values for that. No function may have the name of a method below: graph mode would call the
# method instead.

add_to = ops.MultitypeFuncGraph("gaccum_ms_add_to")
add_compensated_to = ops.MultitypeFuncGraph("gaccum_ms_add_compensated")
read_compensated = ops.MultitypeFuncGraph("gaccum_ms_read_compensated")
zero = ops.MultitypeFuncGraph("gaccum_ms_zero")
zero.register("Tensor")(zero_in_place)
_cast = ops.Cast()  # for each weight, one function less in a graph than `ops.cast`


@add_to.register("Tensor", "Tensor")
def _add_to(accumulator: ms.Parameter, gradient: ms.Tensor) -> ms.Tensor:
    gradient = _cast(gradient, accumulator.dtype)
    if accumulator.dtype != ms.bfloat16:
        return add_in_place(accumulator, gradient)
    return write(accumulator, accumulator + gradient)


@add_compensated_to.register("Tensor", "Tensor", "Tensor")
def _add_compensated_to(accumulator: ms.Parameter, compensation: ms.Parameter, gradient: ms.Tensor) -> ms.Tensor:
    """Kahan's step: the rounding of the sum took away ``(old - new) + addend`` ."""
    addend = compensation + ops.cast(gradient, ms.float32)
    old = ops.cast(accumulator, ms.float32)
    rounded = ops.cast(old + addend, accumulator.dtype)
    lost = (old - ops.cast(rounded, ms.float32)) + addend
    assigned = ops.assign(compensation, lost)
    return write(accumulator, ops.depend(rounded, assigned))


@read_compensated.register("Tensor", "Tensor")
def _read_compensated(accumulator: ms.Parameter, compensation: ms.Parameter) -> ms.Tensor:
    return ops.cast(accumulator, ms.float32) + compensation


class NoSums(nn.Cell):
    """For a window that always is one micro-batch: its gradients need no accumulators."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.sums = ms.ParameterTuple(())

    def reset(self, after):
        return after

    def reset_eagerly(self) -> None:
        """Nothing."""


class GradientSums(nn.Cell):
    """The accumulators of a window, with or without compensation: add, read, reset."""

    def __init__(
        self,
        weights: Sequence[ms.Parameter],
        dtype: ms.Type | None,
        compensated: bool,
        allocate: Callable[..., ms.ParameterTuple] = allocate,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.sums = allocate(weights, dtype, PREFIX)
        self.compensated = compensated
        self.adds_in_branch = on_cpu() and any(parameter.dtype == ms.bfloat16 for parameter in self.sums)
        if self.adds_in_branch:
            self.always = ms.Tensor(True)
        if compensated:
            self.compensations = allocate(weights, ms.float32, COMPENSATION_PREFIX)
        # The last layer first, as backward computes gradients. Additions keep program order; in the other order every
        # gradient would stay in memory until the first layer's is computed.
        self.map = ops.HyperMap(reverse=True)

    def add(self, gradients):
        return self.add_in_branch(*gradients) if self.adds_in_branch else self.add_here(gradients)

    def add_in_branch(self, *gradients):
        """A graph that reads an accumulator twice copies it in between, for which MindSpore has no bfloat16 kernel on
        CPU. A branch has a graph of its own."""
        added = ops.zeros((), ms.float32)
        if ops.depend(self.always, gradients[0]):  # no constant of the graph
            added = ops.depend(added, self.add_here(gradients))
        return added

    def add_here(self, gradients):
        if not self.compensated:
            return self.map(add_to, self.sums, gradients)
        return self.map(add_compensated_to, self.sums, self.compensations, gradients)

    def read(self, after):
        """The sums, once `after` is computed."""
        if not self.compensated:
            return ops.depend(self.sums, after)
        return self.map(read_compensated, ops.depend(self.sums, after), ops.depend(self.compensations, after))

    def reset(self, after):
        """Zero everything, once `after` is computed."""
        cleared = self.map(zero, ops.depend(self.sums, after))
        if not self.compensated:
            return ops.depend(after, cleared)
        return ops.depend(after, self.map(zero, ops.depend(self.compensations, cleared)))

    # -- not compiled --------------------------------------------------------------------------------------------------

    def reset_eagerly(self) -> None:
        """Zero everything, outside of a graph."""
        with no_grad():
            for parameter in (*self.sums, *(self.compensations if self.compensated else ())):
                zero_in_place(parameter)

    def adapt(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A checkpoint's sums in this form, if only one of the checkpoint and this Cell has compensations."""
        adapted = dict(values)
        for accumulator in self.sums:
            lost = COMPENSATION_PREFIX + accumulator.name.removeprefix(PREFIX)
            if accumulator.name in values and self.compensated != (lost in values):
                total = values[accumulator.name].astype(np.float32) + values.get(lost, np.float32(0.0))
                adapted[accumulator.name] = total
                if self.compensated:
                    adapted[lost] = total - ms.Tensor(total, accumulator.dtype).astype(ms.float32).asnumpy()
        return adapted
