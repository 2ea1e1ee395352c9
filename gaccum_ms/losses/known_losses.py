"""MindSpore's losses that are a mean over labels: finding them in a network, and the advice to count the labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import mint, nn

from gaccum_ms.backend.code_of_cells import named_cells
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.counts import CountSamples

_OF_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss, mint.nn.CrossEntropyLoss, mint.nn.NLLLoss)
_INTEGERS = (ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64)


def cells_of(function: Any) -> Iterator[tuple[str, nn.Cell]]:
    """The Cells, by name, that a network holds, or those that a function of a loop names."""
    for prefix, network in named_cells(function).items():
        for name, cell in held_cells(network):
            yield ".".join(filter(None, (prefix, name))), cell


def losses_of_labels(function: Any) -> dict[str, nn.Cell]:
    """The losses, by name, that are a mean over labels: of class weights, or of those that are not ignored."""
    return {
        name: cell for name, cell in cells_of(function) if isinstance(cell, _OF_LABELS) and cell.reduction == "mean"
    }


class IgnoredLabels:
    """The labels that these losses of a network, or of a function of a loop, ignore in the batches of a window.
    `owner` : the class in advice; `counts` : what is counted of the losses, None for samples."""

    def __init__(self, owner: str, function: Any, counts: Sequence[Any]) -> None:
        self._owner = owner
        by_samples = all(count is None or isinstance(count, CountSamples) for count in counts)
        is_exact = isinstance(function, WithBatchLossCell) or not by_samples
        self._losses = {} if is_exact else losses_of_labels(function)
        # For each label that is ignored, and each input, how many of them the window's first sample has.
        self._ignored: dict[tuple[int, int], int] = {}

    def advice(self, batch: Sequence[Any]) -> str | None:
        """What to say about a loss that is weighed in a wrong way, as far as this batch and those before it show."""
        for name, loss in self._losses.items():
            position = _ignored(loss, batch, self._ignored) if loss.weight is None else None
            if position is not None:
                return _of_ignored(self._owner, name, loss, position, len(batch))
        return None


def _of_ignored(owner: str, name: str, loss: nn.Cell, position: int, inputs: int) -> str:
    index = "" if loss.ignore_index == -100 else str(loss.ignore_index)
    where = "" if position == inputs - 1 else f"position={position}"
    count = f"gaccum_ms.CountNotIgnored({', '.join(filter(None, (index, where)))})"
    remedy = f"Give the cell count={count}"
    if owner == "GradAccumulator":
        remedy = f"Give each call a count: accumulator(gradients, {count}(*batch))"
    return (
        f"For '{owner}', the loss '{name}' is a mean over the labels that are not {loss.ignore_index}, which samples "
        f"have in different numbers: they must be counted so. {remedy}; with shift=1 if the network compares each "
        f"output with the next label."
    )


def integer_inputs(batch: Sequence[Any]) -> list[int]:
    """The positions of inputs that may be labels; labels of a float dtype are probabilities, over which a loss with
    class weights is a mean over samples."""
    return [index for index, value in enumerate(batch) if isinstance(value, ms.Tensor) and value.dtype in _INTEGERS]


def _ignored(loss: nn.Cell, batch: Sequence[Any], ignored: dict[tuple[int, int], int]) -> int | None:
    """The position of the labels, if samples have different numbers of ignored ones, or others than in earlier
    batches."""
    for position in reversed(integer_inputs(batch)):
        labels = batch[position].asnumpy()
        if labels.ndim and labels.size:
            numbers = (labels == loss.ignore_index).reshape((len(labels), -1)).sum(axis=1)
            first = ignored.setdefault((loss.ignore_index, position), int(numbers[0]))
            if (numbers != first).any():
                return position
    return None
