"""MindSpore's losses whose value is no mean over samples: finding them in a network, and the remedy for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

from gaccum_ms.backend.code_of_cells import calls_of
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.counts import CountSamples
from gaccum_ms.losses.counts_of_labels import CountNotIgnored

_OF_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss, mint.nn.CrossEntropyLoss, mint.nn.NLLLoss)
_FUNCTIONS = (ops.cross_entropy, ops.nll_loss)  # the same losses, as functions
_OF_BATCH = {
    nn.RMSELoss: "a root of a mean",
    nn.DiceLoss: "a quotient of sums",
    nn.MultiClassDiceLoss: "a mean of quotients of sums",
}
_INTEGERS = (ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8, ms.uint16, ms.uint32, ms.uint64)


def losses_of_labels(network: nn.Cell) -> dict[str, nn.Cell]:
    """The losses, by name, that are a mean over labels: of class weights, or of those that are not ignored."""
    return {
        name: cell for name, cell in held_cells(network) if isinstance(cell, _OF_LABELS) and cell.reduction == "mean"
    }


class FunctionOfLabels(NamedTuple):
    """Such a loss that a Cell's code calls, with the arguments of MindSpore's functions."""

    weight: Any = None
    ignore_index: Any = -100
    reduction: Any = "mean"


def functions_of_labels(network: nn.Cell) -> list[tuple[str, FunctionOfLabels]]:
    """The calls of these losses in the network's code, each with the function's name there."""
    calls = [
        (name, FunctionOfLabels(**arguments))
        for _, cell in held_cells(network)
        if not type(cell).__module__.startswith("mindspore.")
        for name, arguments in calls_of(cell, _FUNCTIONS, FunctionOfLabels._fields)
    ]
    return [(name, call) for name, call in calls if call.reduction == "mean" and isinstance(call.ignore_index, int)]


def advice_about_losses(network: nn.Cell, counts: Sequence[Any], batch: Sequence[ms.Tensor] | None = None) -> list[str]:
    """What to say about known losses that are weighed in a wrong way. `counts` : of its losses; None counts samples."""
    if isinstance(network, WithBatchLossCell):
        return []
    of_batch = {
        name: kind for name, cell in held_cells(network) for loss, kind in _OF_BATCH.items() if isinstance(cell, loss)
    }
    # MultiClassDiceLoss has a DiceLoss.
    told = [_of_batch(name, kind) for name, kind in of_batch.items() if name.rpartition(".")[0] not in of_batch]
    by_samples = all(count is None or isinstance(count, CountSamples) for count in counts)
    by_labels = all(type(count) is CountNotIgnored for count in counts)
    for name, loss in (*losses_of_labels(network).items(), *functions_of_labels(network)):
        if loss.weight is not None:
            if (by_samples or by_labels) and (batch is None or integer_inputs(batch)):
                told.append(_of_class_weights(name, loss))
        elif by_samples and batch is not None:
            position = _ignored(loss, batch)
            told += [] if position is None else [_of_ignored(name, loss, position, len(batch))]
    return list(dict.fromkeys(told))


def _of_batch(name: str, kind: str) -> str:
    return (
        f"For 'GradAccumulationCell', the loss '{name}' is {kind} over the whole batch, and the mean of those of "
        f"micro-batches is another number. Give the cell gaccum_ms.WithBatchLossCell(backbone, loss), which is exact."
    )


def _of_class_weights(name: str, loss: nn.Cell | FunctionOfLabels) -> str:
    index = "" if loss.ignore_index == -100 else f", {loss.ignore_index}"
    return (
        f"For 'GradAccumulationCell', the loss '{name}' has class weights and divides by the weights of the labels' "
        f"classes, which micro-batches have in different amounts: they must be counted so. Give the cell "
        f"count=gaccum_ms.CountClassWeights(weight{index})."
    )


def _of_ignored(name: str, loss: nn.Cell | FunctionOfLabels, position: int, inputs: int) -> str:
    index = "" if loss.ignore_index == -100 else str(loss.ignore_index)
    where = "" if position == inputs - 1 else f"position={position}"
    return (
        f"For 'GradAccumulationCell', the loss '{name}' is a mean over the labels that are not {loss.ignore_index}, "
        f"which samples have in different numbers: they must be counted so. Give the cell "
        f"count=gaccum_ms.CountNotIgnored({', '.join(filter(None, (index, where)))}); with shift=1 if the network "
        f"compares each output with the next label."
    )


def integer_inputs(batch: Sequence[Any]) -> list[int]:
    """The positions of inputs that may be labels; labels of a float dtype are probabilities, over which a loss with
    class weights is a mean over samples."""
    return [index for index, value in enumerate(batch) if isinstance(value, ms.Tensor) and value.dtype in _INTEGERS]


def _ignored(loss: nn.Cell | FunctionOfLabels, batch: Sequence[ms.Tensor]) -> int | None:
    """The position of the labels, if samples have different numbers of ignored ones."""
    for position in reversed(integer_inputs(batch)):
        labels = batch[position].asnumpy()
        if labels.ndim:
            ignored = (labels == loss.ignore_index).reshape((len(labels), -1)).sum(axis=1)
            if np.ptp(ignored) if len(ignored) else False:
                return position
    return None
