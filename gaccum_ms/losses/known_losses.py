"""MindSpore's losses whose value is no mean over samples: finding them in a network, and the remedy for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import mint, nn, ops

from gaccum_ms.backend.code_of_cells import calls_of, named_cells
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.checks.arguments import first_of
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.counts import CountSamples
from gaccum_ms.losses.counts_of_labels import CountNotIgnored

_OF_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss, mint.nn.CrossEntropyLoss, mint.nn.NLLLoss)
_FUNCTIONS = (ops.cross_entropy, ops.nll_loss)  # the same losses, as functions
_OF_BATCH = (nn.RMSELoss, nn.DiceLoss, nn.MultiClassDiceLoss)  # a root of a mean, quotients of sums
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


class FunctionOfLabels(NamedTuple):
    """Such a loss that a Cell's code calls, with the arguments of MindSpore's functions."""

    weight: Any = None
    ignore_index: Any = -100
    reduction: Any = "mean"


def functions_of_labels(function: Any) -> list[tuple[str, FunctionOfLabels]]:
    """The calls of these losses in the code of a network or a function, each with the loss's name there."""
    users = [cell for _, cell in cells_of(function) if not type(cell).__module__.startswith("mindspore.")]
    calls = [
        (name, FunctionOfLabels(**arguments))
        for code in (users if isinstance(function, nn.Cell) else [function, *users])
        for name, arguments in calls_of(code, _FUNCTIONS, FunctionOfLabels._fields)
    ]
    return [(name, call) for name, call in calls if call.reduction == "mean" and isinstance(call.ignore_index, int)]


class KnownLosses:
    """The known losses of a network, or of a function of a loop. `owner` : the class in advice; `counts` : what is
    counted of the losses, None for samples."""

    def __init__(self, owner: str, function: Any, counts: Sequence[Any]) -> None:
        self._owner = owner
        self._by_samples = all(count is None or isinstance(count, CountSamples) for count in counts)
        self._by_labels = all(type(count) is CountNotIgnored for count in counts)
        self._of_batch: list[str] = []
        self._of_labels: list[tuple[str, Any]] = []
        # For each label that is ignored, and each input, how many of them the window's first sample has.
        self._ignored: dict[tuple[int, int], int] = {}
        if not isinstance(function, WithBatchLossCell):
            self._of_batch = [name for name, cell in cells_of(function) if isinstance(cell, _OF_BATCH)]
            self._of_labels = [*losses_of_labels(function).items(), *functions_of_labels(function)]

    def advice(self, batch: Sequence[Any] | None = None, is_proved: bool = False) -> list[str]:
        """What to say about those that are weighed in a wrong way, as far as this batch and those before it show.
        `is_proved` : the loss was measured, and only labels of later batches can be ignored otherwise."""
        owner, told = self._owner, []
        if self._of_batch and not is_proved:
            told.append(_of_whole_batch(owner, self._of_batch))
        for name, loss in self._of_labels:
            if loss.weight is not None:
                if not is_proved and (self._by_samples or self._by_labels) and (batch is None or integer_inputs(batch)):
                    told.append(_of_class_weights(owner, name, loss))
            elif self._by_samples and batch is not None:
                position = _ignored(loss, batch, self._ignored)
                told += [] if position is None else [_of_ignored(owner, name, loss, position, len(batch))]
        return list(dict.fromkeys(told))


def _of_whole_batch(owner: str, names: Sequence[str]) -> str:
    return (
        f"For '{owner}', a loss ({first_of(names)}) is a root or a quotient of sums over the whole batch, and the mean "
        f"of those of micro-batches is another number. Give a GradAccumulationCell "
        f"gaccum_ms.WithBatchLossCell(backbone, loss), which is exact."
    )


def _of_class_weights(owner: str, name: str, loss: nn.Cell | FunctionOfLabels) -> str:
    index = "" if loss.ignore_index == -100 else f", {loss.ignore_index}"
    return (
        f"For '{owner}', the loss '{name}' has class weights and divides by the weights of the labels' classes, of "
        f"which parts of a window have different amounts: they must be counted so. "
        f"{_remedy(owner, f'CountClassWeights(weight{index})')}."
    )


def _of_ignored(owner: str, name: str, loss: nn.Cell | FunctionOfLabels, position: int, inputs: int) -> str:
    index = "" if loss.ignore_index == -100 else str(loss.ignore_index)
    where = "" if position == inputs - 1 else f"position={position}"
    count = f"CountNotIgnored({', '.join(filter(None, (index, where)))})"
    return (
        f"For '{owner}', the loss '{name}' is a mean over the labels that are not {loss.ignore_index}, which samples "
        f"have in different numbers: they must be counted so. {_remedy(owner, count)}; with shift=1 if the network "
        f"compares each output with the next label."
    )


def _remedy(owner: str, count: str) -> str:
    if owner == "GradAccumulator":
        return f"Give each call a count: accumulator(gradients, gaccum_ms.{count}(*batch))"
    return f"Give the cell count=gaccum_ms.{count}"


def integer_inputs(batch: Sequence[Any]) -> list[int]:
    """The positions of inputs that may be labels; labels of a float dtype are probabilities, over which a loss with
    class weights is a mean over samples."""
    return [index for index, value in enumerate(batch) if isinstance(value, ms.Tensor) and value.dtype in _INTEGERS]


def _ignored(loss: nn.Cell | FunctionOfLabels, batch: Sequence[Any], ignored: dict[tuple[int, int], int]) -> int | None:
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
