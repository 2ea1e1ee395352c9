"""Restores, bit for bit after a trial, everything that a network's `construct` may write, and the default generator.

It covers values of Parameters, the cells' flags, and other attributes of cells: buffers and other Tensors, NumPy
arrays, numbers, and lists, dicts and sets of these. Objects of other classes are not restored, because there is no
general way to copy them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.parameters import overwrite

# MindSpore's own attributes of a Cell, among them its compiled graphs; buffers are not among them.
OF_EVERY_CELL = frozenset(vars(nn.Cell())) - {"_buffers"}


class Snapshot:
    """Everything that a trial may change in some cells. `leave_out` : what the trial does not write; it is not
    copied."""

    def __init__(self, *roots: nn.Cell, leave_out: Iterable[ms.Tensor] = ()) -> None:
        self._left_out = {id(tensor) for tensor in leave_out}
        # By id: each Tensor, and its value.
        self.parameters: dict[int, tuple[ms.Tensor, np.ndarray]] = {}
        self.tensors: dict[int, tuple[ms.Tensor, np.ndarray]] = {}
        for root in roots:
            for parameter in root.get_parameters():
                self._keep_values(parameter, self.parameters)
        cells = {id(cell): cell for root in roots for _, cell in root.cells_and_names()}
        self.flags = [(cell, cell.training, cell.requires_grad) for cell in cells.values()]
        self._undo = [self._keep_attributes(cell) for cell in cells.values()]
        self.generator = ms.get_rng_state()

    def restore_values(self, only: Container[int] | None = None) -> None:
        """Restore Parameters and all other state, without flags and generator. `only` : the ids of Parameters; others
        are left."""
        for undo in self._undo:
            undo()
        for key, (parameter, value) in self.parameters.items():
            if (only is None or key in only) and not has_value(parameter, value):
                overwrite(parameter, ms.Tensor(value, parameter.dtype))  # compiled graphs need not see set_data
        for tensor, value in self.tensors.values():
            if not has_value(tensor, value):  # most are constants, also in graphs
                overwrite(tensor, ms.Tensor(value, tensor.dtype))

    def restore(self) -> None:
        self.restore_values()
        for cell, training, requires_grad in self.flags:
            cell.add_flags(training=training)  # set_train would set its children too
            nn.Cell.set_grad(cell, requires_grad)  # GradAccumulationCell.set_grad refuses
        ms.set_rng_state(self.generator)

    def unchanged(self) -> list[ms.Tensor]:
        """The Parameters and other Tensors whose values have not changed."""
        saved = [*self.parameters.values(), *self.tensors.values()]
        return [tensor for tensor, value in saved if has_value(tensor, value)]

    def _keep_values(self, tensor: ms.Tensor, saved: dict[int, tuple[ms.Tensor, np.ndarray]]) -> None:
        if id(tensor) not in self._left_out and id(tensor) not in saved:
            saved[id(tensor)] = tensor, as_numpy(tensor)

    def _keep_attributes(self, cell: nn.Cell) -> Callable[[], None]:
        attributes = vars(cell)
        saved = {
            name: (value, self._keep(value))
            for name, value in attributes.items()
            if name not in OF_EVERY_CELL and not isinstance(value, (nn.Cell, ms.Parameter, ms.ParameterTuple))
        }
        known = set(attributes)

        def undo() -> None:
            for name in set(attributes) - known - OF_EVERY_CELL:
                if not name.startswith("_"):  # these are MindSpore's notes from compiling
                    del attributes[name]
            for name, (value, undo_value) in saved.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
                undo_value()

        return undo

    def _keep(self, value: Any) -> Callable[[], None]:
        """A function that restores a value that was modified in place."""
        if isinstance(value, ms.Tensor) and not isinstance(value, ms.Parameter):
            self._keep_values(value, self.tensors)
        elif isinstance(value, np.ndarray):
            array = value.copy()
            return lambda: np.copyto(value, array) if value.flags.writeable else None
        elif type(value) in (list, dict, set, tuple):
            inner = [self._keep(entry) for entry in (value.values() if isinstance(value, dict) else value)]
            copy = value.copy() if not isinstance(value, tuple) else value

            def undo() -> None:
                if not isinstance(value, tuple):
                    value.clear()
                    value.extend(copy) if isinstance(value, list) else value.update(copy)
                for undo_entry in inner:
                    undo_entry()

            return undo
        return lambda: None


def has_value(tensor: ms.Tensor, value: np.ndarray) -> bool:
    """Whether a Tensor has this value, bit for bit; a comparison of floats takes ten times as long."""
    now = _view(tensor)
    return now.dtype == value.dtype and now.shape == value.shape and np.array_equal(_bits(now), _bits(value))


def as_numpy(tensor: ms.Tensor) -> np.ndarray:
    """A copy of the value. bfloat16 becomes float32."""
    return np.array(_view(tensor), order="C")


def _view(tensor: ms.Tensor) -> np.ndarray:
    """The value, or a copy of it; training would change a view."""
    return (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()


def _bits(value: np.ndarray) -> np.ndarray:
    """As integers, the widest that the size allows, which compare fastest."""
    return np.ascontiguousarray(value).reshape(-1).view(f"u{math.gcd(value.nbytes, 8)}")
