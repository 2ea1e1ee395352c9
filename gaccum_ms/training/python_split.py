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

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ops

from gaccum_ms.accumulation.open_window import SUMS
from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import OfWindow
from gaccum_ms.backend.snapshot import as_numpy
from gaccum_ms.backend.without_effect import CannotPutBack, outputs_of
from gaccum_ms.checks.arguments import described
from gaccum_ms.training.runner import Batch, Runner

if TYPE_CHECKING:
    from gaccum_ms.training.components import Components

_NAME = "GradAccumulationCell"


class AddMicroBatch(OfWindow):
    """Adds a micro-batch, on this rank alone. Returns the batch's sums and mean loss so far, and the outputs."""

    def construct(self, sums, times, *micro_batch):
        micro_batch = clear_flag(micro_batch)
        return self.window.add_micro_batch(sums, times, micro_batch, self.update.scale())


class Added(NamedTuple):
    """A batch that was added to the window: its sums, its mean loss, and its outputs."""

    sums: ms.Tensor
    loss: Any
    outputs: list[ms.Tensor]


class PythonSplit(Runner):
    """Trains on batches that a function splits. Those of a `MaxTokens` have a size, a number of tokens."""

    split: Any  # a Splitter
    size_is = "max_tokens"

    def __init__(self, components: Components) -> None:
        options = components.options
        self._components = components
        self._end_window: Any = components.end_window
        self._count = options.own_count
        self._by_samples = self._count is None
        self._first_output = 1 + options.returns_ratio  # its position in what the network returns
        self.split = options.split.working_copy()
        self._renew_graphs()

    def _renew_graphs(self) -> None:
        """Discard the graphs of the old shapes, which frees their memory."""
        self._graph = AddMicroBatch(
            self._components.window, self._components.update, bool(self._components.options.jit)
        )
        gc.collect()

    @property
    def size(self) -> int | None:
        """Tokens in a micro-batch; None: not found yet."""
        return self.split.max_tokens

    @property
    def least(self) -> int:
        """The smallest possible size."""
        return self.split.widths[-1] if self.split.widths else 1

    def cut_into(self, size: int) -> None:
        """Train with this size from now on."""
        self.split.max_tokens = size
        self._renew_graphs()

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        micro_batches = micro_batches_of(self.split, inputs, self._by_samples)
        self._components.check_inputs(len(micro_batches[0]))
        self.split.check_padding(self._counted)
        return Batch(inputs, lambda: micro_batches)

    def _counted(self, *micro_batch: ms.Tensor) -> list[tuple[str, float]]:
        """What a micro-batch counts, and with a ratio its numerator, by names for an error."""
        if self._count is not None:
            return [("'count'", float(self._count(*micro_batch)))]
        if not self._components.options.returns_ratio:
            return []
        try:
            outputs = outputs_of(self._components.network, micro_batch, self._components.weights)
        except CannotPutBack:  # the network takes from an iterator
            return []
        pair = [np.asarray(as_numpy(value) if isinstance(value, ms.Tensor) else value) for value in outputs[:2]]
        if len(pair) < 2 or any(value.dtype.kind not in "iufb" or value.size != 1 for value in pair):
            return []  # a check explains it when the step is compiled
        numerator, denominator = (float(value.item()) for value in pair)
        return [("the denominator of a ratio", denominator), ("the numerator of a ratio", numerator)]

    def run(self, batch: Batch) -> Any:
        return self.end(self.add(batch))

    def add(self, batch: Batch) -> Added:
        """Add the micro-batches of a batch to the window, on this rank alone."""
        micro_batches: Any = batch.micro_batches()
        window = self._components.window.open
        window.begin_eagerly()
        sums, loss = ms.Tensor(np.zeros(SUMS + 1, np.float32)), None
        outputs = []
        for micro_batch, times in zip(micro_batches, self._times(micro_batches), strict=True):
            self._components.window.copies.begin()  # `add_micro_batch` plans nothing
            sums, loss, *own_outputs = self._graph.run_alone(sums, ms.Tensor(times, ms.float32), *micro_batch)
            outputs.append(own_outputs)
        # Before the batch is in the window: an output that cannot be joined is an error without an update.
        joined = [
            self._joined(number, of_all, micro_batches, sums[:SUMS])
            for number, of_all in enumerate(zip(*outputs, strict=True))
        ]
        window.end_eagerly(sums)
        return Added(sums, loss, joined)

    def end(self, added: Added) -> Any:
        """Finish a batch; if its window ends, update on all ranks. Returns what the step returns."""
        components, window = self._components, self._components.window.open
        _, loss, outputs = added
        scale = components.update.scale()
        overflow = ms.Tensor(False, ms.bool_)
        if window.is_full:
            is_one_batch = int(window.window_steps.asnumpy()) == 1
            overflow = self._end_window.run_alone(loss)
            if is_one_batch:
                loss = window.window_loss + 0.0  # a copy of a Parameter is a Parameter
        components.count_batch()
        return components.update.returned(loss, overflow, scale, outputs)

    def _joined(
        self,
        number: int,
        outputs: Sequence[ms.Tensor],
        micro_batches: Sequence[tuple[ms.Tensor, ...]],
        sums: ms.Tensor,
    ) -> Any:
        """One output, joined over all micro-batches: the mean of outputs of shape (); others are concatenated, or put
        into the batch's order by `split` ."""
        if outputs[0].ndim == 0:
            unit = self._components.window.open.window_unit + 0.0
            scale = self._components.update.scale()
            return self._components.window.ledger.own_mean(ops.addn(list(outputs)), sums, unit, scale)
        if not self.split.joins:
            return outputs[0]
        arrays = [output.asnumpy() for output in outputs]
        if self.split.trims:
            joined = self.split.in_order(arrays)
        else:
            joined = _concatenated(self._first_output + number, arrays, micro_batches)
        return ms.Tensor(joined, outputs[0].dtype)

    def _times(self, micro_batches: Sequence[tuple[ms.Tensor, ...]]) -> list[float]:
        """For each micro-batch, the expected ratio of the batch's count to its own. The first micro-batch that counts
        anything sets the unit."""
        if not self._by_samples:
            return [float(len(micro_batches))] * len(micro_batches)
        samples = [micro_batch[0].shape[0] for micro_batch in micro_batches]
        return [sum(samples) / number for number in samples]


def _concatenated(
    position: int, arrays: Sequence[np.ndarray], micro_batches: Sequence[tuple[ms.Tensor, ...]]
) -> np.ndarray:
    """An output of micro-batches that a function made, joined along axis 0. Nobody knows which of their inputs count
    samples, so its length must differ between micro-batches, or be that of an input. `position` : of the output among
    the network's."""
    rows = [array.shape[0] for array in arrays]
    of_inputs = [
        [value.shape[0] if value.ndim else 1 for value in values] for values in zip(*micro_batches, strict=True)
    ]
    if len({array.shape[1:] for array in arrays}) == 1 and (len(set(rows)) > 1 or rows in of_inputs):
        return np.concatenate(arrays)
    raise ValueError(
        f"For '{_NAME}', with a function as 'split' an output beside the loss must have its samples on axis 0, or "
        f"shape (), but output {position} got shapes {[array.shape for array in arrays]} for micro-batches with inputs "
        f"of shapes {[[part.shape for part in micro_batch] for micro_batch in micro_batches]}. Return a mean of shape "
        f"(), or an entry for each sample; ops.swapaxes brings samples to axis 0. Nothing was updated."
    )


def micro_batches_of(split: Callable, batch: Sequence[Any], by_samples: bool) -> list[tuple[ms.Tensor, ...]]:
    """The inputs of each micro-batch that a function makes of a batch. `by_samples` : whether they are weighted by
    their samples."""
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
    micro_batches = [_inputs_of(number, micro_batch, by_samples) for number, micro_batch in enumerate(made)]
    lengths = [len(micro_batch) for micro_batch in micro_batches]
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
