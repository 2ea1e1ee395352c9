"""What a loss says of its own reduction, where its value is the network's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from mindspore import nn, ops

from gaccum_ms import backend
from gaccum_ms.backend.code_of_cells import returned_by
from gaccum_ms.backend.held_cells import held_values
from gaccum_ms.losses.in_float32 import InFloat32

_WORDS = {"mean": "mean", "sum": "sum", "none": "none", "batchmean": "mean"}  # the last one is of nn.KLDivLoss
# Some of MindSpore's operators keep a number in place of the word.
_WORDS_OF_NUMBERS = {ops.BCEWithLogitsLoss(word).reduction: word for word in ("mean", "sum", "none")}


class StatedReduction(NamedTuple):
    """The reduction that a loss says it has."""

    loss: str  # its class
    reduction: str  # "mean", "sum" or "none"
    is_certain: bool  # whether MindSpore's own code reduces; a user's code may do what it likes


def is_with_loss_cell(network: Any) -> bool:
    """Whether a network's value is that of its loss, as MindSpore's `nn.WithLossCell` returns it."""
    return type(network).construct is nn.WithLossCell.construct if isinstance(network, nn.Cell) else False


def stated_reduction(function: Callable[..., Any]) -> StatedReduction | None:
    """What the loss of a network, or of a function of a loop, says; None if it says nothing, or its value is not the
    network's."""
    network: Any = _without_casts(function)
    if not is_with_loss_cell(network):
        return None
    loss = _without_casts(network._loss_fn)
    owner = next(kind for kind in type(loss).__mro__ if "construct" in vars(kind))
    is_certain = True
    if owner.__module__.startswith("mindspore."):
        word = _of_mindspore(loss, owner)
    elif isinstance(loss, nn.LossBase) and _returns_get_loss(loss):
        word = _of_base(loss)
    else:
        word, is_certain = _of_user(loss, owner), False
    return None if word is None else StatedReduction(type(loss).__name__, word, is_certain)


def _without_casts(cell: Any) -> Any:
    """What is inside the Cells that mixed precision puts around a network or a loss."""
    while isinstance(cell, (backend.OutputTo16, backend.OutputTo32, InFloat32)):
        cell = cell.loss_fn if isinstance(cell, InFloat32) else cell._backbone
    return cell


def _of_user(loss: nn.Cell, owner: type) -> str | None:
    """Of a loss with a user's code, which often reduces by itself what an operator with "none" returns. What a loss of
    MindSpore says is of the code that the user's replaces."""
    if any(kind is not nn.LossBase and _takes_reduction(kind) for kind in owner.__mro__[1:]):
        return None
    own = getattr(loss, "reduction", None)
    if own is None and isinstance(loss, nn.LossBase):
        own = _of_base(loss)
    return own if own in ("mean", "sum") else None


def _of_mindspore(loss: nn.Cell, owner: type) -> str | None:
    """Of a loss with MindSpore's own code: its `reduction` , else that of the operator or loss that it calls, else that
    of `nn.LossBase` , which does not know it if one of these does."""
    if not _takes_reduction(owner):  # such as nn.RMSELoss, a root of a mean
        return None
    words = [_word(getattr(value, "reduction", None)) for value in (loss, *(value for _, value in held_values(loss)))]
    return next(filter(None, words), None) or (_of_base(loss) if isinstance(loss, nn.LossBase) else None)


def _takes_reduction(kind: type) -> bool:
    """Whether it is a Cell of MindSpore whose constructor takes a `reduction` ."""
    is_of_mindspore = issubclass(kind, nn.Cell) and kind.__module__.startswith("mindspore.")
    return is_of_mindspore and "reduction" in inspect.signature(kind.__init__).parameters  # type: ignore[misc]


def _of_base(loss: nn.LossBase) -> str:
    if not loss.reduce:
        return "none"
    return "mean" if loss.average else "sum"


def _word(value: Any) -> str | None:
    if isinstance(value, str):
        return _WORDS.get(value)
    return _WORDS_OF_NUMBERS.get(value) if isinstance(value, int) else None


def _returns_get_loss(loss: nn.LossBase) -> bool:
    """Whether a user's loss returns what `nn.LossBase.get_loss` does, which reduces."""
    returned = returned_by(loss)
    is_own = type(loss).get_loss is nn.LossBase.get_loss
    return is_own and bool(returned) and all(code.startswith("self.get_loss(") for code in returned)
