"""The axis of an output that counts samples: the one that grows when there are more of them.

A length that equals the number of samples by chance says nothing. So the network runs forward on two numbers of
samples, once, before the first batch. It runs eagerly and without a gradient, and everything that it wrote is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.splitting.even_split import UNCUT, SplitPlan


class Output(NamedTuple):
    """An output at two numbers of samples. Without a second run, both are the same."""

    position: int  # among the network's outputs
    samples: tuple[int, int]
    values: tuple[np.ndarray, np.ndarray]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.values[0].shape, self.values[1].shape

    @property
    def text(self) -> str:
        """Where it is, and its shapes."""
        (few, many), (shape, other) = self.samples, self.shapes
        more = "" if few == many else f" and shape {other} for {many}"
        return f"output {self.position} got shape {shape} for {few} sample(s){more}"

    def axis(self, lengths: tuple[int, int] = (0, 0)) -> int | None:
        """The axis of samples; `UNCUT` if nothing about the output depends on the samples; None if neither. `lengths` :
        the widths of tokens in both runs, which another axis may have."""
        shape, other = self.shapes
        if len(shape) != len(other):
            return None
        pairs = list(zip(shape, other, strict=True))
        grown = [axis for axis, pair in enumerate(pairs) if pair == self.samples]
        few, many = self.samples
        if few == many:
            return grown[0] if grown else None
        others = {pair for pair in pairs if pair[0] != pair[1]} - {self.samples, lengths}
        if others or len(grown) > 1:
            return None
        if grown:
            return grown[0]
        return UNCUT if np.array_equal(*self.values, equal_nan=self.values[0].dtype.kind in "fc") else None

    def axes_of(self, lengths: tuple[int, int]) -> tuple[int, ...]:
        """The axes of these lengths in both runs."""
        shape, other = self.shapes
        if self.samples[0] == self.samples[1]:  # there was one run
            return (1,) if len(shape) > 1 and shape[1] == lengths[0] else ()
        return tuple(axis for axis, pair in enumerate(zip(shape, other, strict=True)) if pair == lengths)


def outputs_of(
    network: nn.Cell,
    runs: Sequence[Sequence[ms.Tensor]],
    samples: tuple[int, int],
    weights: Sequence[ms.Parameter],
) -> list[Output | None]:
    """The network's outputs at two numbers of samples; None for what is no Tensor. A network that takes only the first
    number is asked about it alone. `runs` : the inputs of both; `samples` : their numbers of samples; `weights` : what
    forward does not write."""
    with _forward_alone(network, weights):
        first = _values(network(*runs[0]))
        try:
            second = _values(network(*runs[1]))
        except Exception:  # such as a reshape to one number of samples
            close_tape()  # no gradient is open, but MindSpore has begun to count this call
            second, samples = first, (samples[0], samples[0])
    if len(first) != len(second):
        return []
    return [
        None if size is None or other_size is None else Output(position, samples, (size, other_size))
        for position, (size, other_size) in enumerate(zip(first, second, strict=True))
    ]


def ratio_of(
    network: nn.Cell, inputs: Sequence[ms.Tensor], weights: Sequence[ms.Parameter]
) -> tuple[float, float] | None:
    """The numerator and the denominator that the network returns for a micro-batch; None if it returns no such pair,
    which a check explains when the step is compiled."""
    with _forward_alone(network, weights):
        outputs = network(*inputs)
        pair = [np.asarray(as_numpy(value) if isinstance(value, ms.Tensor) else value) for value in outputs[:2]]
    if len(pair) < 2 or any(value.dtype.kind not in "iufb" or value.size != 1 for value in pair):
        return None
    return float(pair[0].item()), float(pair[1].item())


@contextmanager
def _forward_alone(network: nn.Cell, weights: Sequence[ms.Parameter]) -> Iterator[None]:
    """Within it, the network runs eagerly and without a gradient; then everything that it wrote is restored."""
    before = Snapshot(network, leave_out=weights)
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with no_grad():
            yield
    except BaseException:
        close_tape()
        raise
    finally:
        ms.set_context(mode=mode)
        before.restore()


def _values(outputs: Any) -> list[np.ndarray | None]:
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [as_numpy(output) if isinstance(output, ms.Tensor) else None for output in outputs]


def two_numbers(
    inputs: Sequence[ms.Tensor], plan: SplitPlan, axes: Sequence[int]
) -> tuple[list[list[ms.Tensor]], tuple[int, int]]:
    """Micro-batches of two sizes: those of the plan, else a full one and one of twice its samples."""
    many, start = (plan.rest, plan.samples - plan.rest) if plan.rest else (2 * plan.size, 1)
    places = np.arange(plan.size), np.arange(start, start + many) % plan.samples
    rows = [ms.Tensor(place, ms.int32) for place in places]
    with no_grad():
        runs = [
            [value if axis == UNCUT else ops.gather(value, row, axis) for value, axis in zip(inputs, axes, strict=True)]
            for row in rows
        ]
    return runs, (plan.size, many)
