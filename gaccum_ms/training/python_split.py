"""A function as `split` : Python cuts each batch, and passes its micro-batches to compiled micro-steps, one at a time.

Other steps have one graph; this one has a graph for each set of input shapes of a micro-batch, and one for the end:

    Python:                     split; everything is checked before anything runs
    each rank by itself:        for each micro-batch: forward, backward, add                    (window.py)
    a window's last batch?
    all ranks:                  reduce, divide, clip, update, clear                             (update.py)

A window of one batch is an open window too (open_window.py): each rank keeps its sums until all ranks have added their
micro-batches, however many these are. A window's length is counted in batches, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.backend.checks import described
from gaccum_ms.backend.graphs import OwnGraph
from gaccum_ms.backend.parameters import overwrite

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update
    from gaccum_ms.options import Options
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as Step

_NAME = "GradAccumulationCell"
_SUMS = 4  # for a batch: losses, counts, dropped micro-batches, and items


class AddMicroBatch(OwnGraph):
    """Adds a micro-batch, on this rank alone. Returns the batch's sums and mean loss so far, and the outputs."""

    def __init__(self, window: nn.Cell, update: Update, jit: bool) -> None:
        super().__init__(jit)
        self.window = window
        self.update = update

    def construct(self, sums, times, *micro_batch):
        micro_batch = clear_flag(micro_batch)
        return self.window.add_micro_batch(sums, times, micro_batch, self.update.scale())


class Added(NamedTuple):
    """A batch that was added to the window: its sums, its mean loss, and the outputs of each micro-batch."""

    sums: ms.Tensor
    loss: Any
    outputs: list[list[ms.Tensor]]


class PythonSplit:
    """Trains on batches that a function splits.

    Args:
        step (TrainOneStepWithGradAccumulationCell): The step, with its window.
        options (Options): The options of its cell. Their `split` returns the micro-batches of a batch.
    """

    def __init__(self, step: Step, options: Options) -> None:
        self._step = step
        self._count = options.own_count
        self._by_samples = self._count is None
        self._one_batch = options.accumulation_steps == 1
        self._jit = bool(options.jit)
        self.split_by(options.split)
        self.renew_graphs()

    def split_by(self, split: Any) -> None:
        """Split later batches by this function."""
        self._split = split
        self._check_count = getattr(split, "check_count", None)

    def renew_graphs(self) -> None:
        """Discard the graphs of the old shapes, which frees their memory."""
        self._graph = AddMicroBatch(self._step.window, self._step.update, self._jit)

    def parts(self, batch: Sequence[Any]) -> list[tuple[ms.Tensor, ...]]:
        """The checked micro-batches of a batch."""
        made = micro_batches_of(self._split, batch, self._by_samples)
        if self._check_count is not None and self._count is not None:  # with a ratio, the network counts
            self._check_count(self._count)
        return made

    def __call__(self, batch: Sequence[Any], parts: Sequence[tuple[ms.Tensor, ...]]) -> Any:
        """Train on a batch, given as its micro-batches too; returns what the step returns."""
        return self.end(self.add(parts))

    def add(self, parts: Sequence[tuple[ms.Tensor, ...]]) -> Added:
        """Add the micro-batches of a batch to the window, on this rank alone."""
        window = self._step.window.open
        window.begin_eagerly()
        sums, loss = ops.zeros((_SUMS,), ms.float32), None
        outputs = []
        for micro_batch, times in zip(parts, self._times(parts), strict=True):
            sums, loss, *shown = self._graph.run_alone(sums, ms.Tensor(times, ms.float32), *micro_batch)
            outputs.append(shown)
        window.end_eagerly(sums)
        return Added(sums, loss, outputs)

    def end(self, added: Added) -> Any:
        """Finish a batch; if its window ends, update on all ranks. Returns what the step returns."""
        step, window = self._step, self._step.window.open
        sums, loss, outputs = added
        scale = step.update.scale()
        unit = window.window_unit.copy()  # the window's end zeroes it
        overflow = ms.Tensor(False, ms.bool_)
        if window.is_full:
            overflow = step.end_window.run_alone(loss)
            if self._one_batch:
                loss = window.window_loss.copy()
        overwrite(step.batch_count, step.batch_count + 1)
        shown = [self._joined(parts_of, sums[:3], scale, unit) for parts_of in zip(*outputs, strict=True)]
        return step.update.returned(loss, overflow, scale, shown)

    def _joined(self, parts: Sequence[ms.Tensor], sums: ms.Tensor, scale: ms.Tensor, unit: ms.Tensor) -> ms.Tensor:
        """One output, joined over all micro-batches: the mean of outputs of shape (); others are concatenated, or put
        into the batch's order if `split` has the method `in_order` ."""
        if parts[0].ndim == 0:
            return self._step.window.weighing.own_mean(ops.addn(list(parts)), sums, scale, unit)
        in_order = getattr(self._split, "in_order", None)
        arrays = [one.asnumpy() for one in parts]
        return ms.Tensor(np.concatenate(arrays) if in_order is None else in_order(arrays), parts[0].dtype)

    def _times(self, parts: Sequence[tuple[ms.Tensor, ...]]) -> list[float]:
        """For each micro-batch, the expected ratio of the batch's count to its own. The first micro-batch that counts
        anything sets the unit of the sums."""
        if not self._by_samples:
            return [float(len(parts))] * len(parts)
        samples = [one[0].shape[0] for one in parts]
        return [sum(samples) / number for number in samples]


def micro_batches_of(split: Callable, batch: Sequence[Any], by_samples: bool) -> list[tuple[ms.Tensor, ...]]:
    """The inputs of each micro-batch that a function makes of a batch.

    Args:
        split (Callable): The function, or an object that can be called.
        batch (Sequence): The inputs of the step.
        by_samples (bool): Whether micro-batches are weighted by their samples.

    Raises:
        TypeError: If it returns something other than a list of tuples of Tensors.
        ValueError: If there is no micro-batch; if they differ in the number of inputs; with `by_samples` , if the first
            input has no axis 0 or no samples.
    """
    made: Any = split(*batch)
    if not isinstance(made, (tuple, list)):
        raise TypeError(
            f"For '{_NAME}', the function 'split' must return a list of micro-batches, each a tuple of Tensors, but "
            f"got {described(made)}."
        )
    if not made:
        raise ValueError(
            f"For '{_NAME}', the function 'split' must return at least one micro-batch, but got an empty "
            f"{type(made).__name__}. Leave such a batch out of the data set, or return a micro-batch that 'count' maps "
            f"to 0."
        )
    micro_batches = [_inputs_of(number, one, by_samples) for number, one in enumerate(made)]
    lengths = [len(one) for one in micro_batches]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"For '{_NAME}', the function 'split' must return micro-batches with the same number of inputs, but got "
            f"{lengths}."
        )
    return micro_batches


def _inputs_of(number: int, micro_batch: Any, by_samples: bool) -> tuple[ms.Tensor, ...]:
    if isinstance(micro_batch, ms.Tensor):
        micro_batch = (micro_batch,)
    if not isinstance(micro_batch, (tuple, list)):
        raise TypeError(
            f"For '{_NAME}', the function 'split' must return micro-batches that are tuples of Tensors, the network's "
            f"inputs in their order, but micro-batch {number} is {described(micro_batch)}."
            + " Give the Tensors of a dict as inputs of their own."
            * isinstance(micro_batch, dict)
        )
    for position, value in enumerate(micro_batch):
        if not isinstance(value, ms.Tensor) or value.dtype == ms.string:
            raise TypeError(
                f"For '{_NAME}', the function 'split' must return micro-batches of Tensors of numbers, but input "
                f"{position} of micro-batch {number} is {described(value)}. Give the Tensors of a dict, tuple or list "
                f"as inputs of their own, and make a Tensor of anything else."
            )
    if not micro_batch or (by_samples and (not micro_batch[0].shape or not micro_batch[0].shape[0])):
        raise ValueError(
            f"For '{_NAME}', the function 'split' must return micro-batches of which axis 0 of the first input counts "
            f"samples, at least one, or 'count' must be given, but micro-batch {number} is {described(micro_batch)}."
        )
    return tuple(micro_batch)
