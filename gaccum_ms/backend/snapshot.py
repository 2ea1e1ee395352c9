"""Restores, bit for bit after a trial, everything that a network's `construct` may write, and the default generator.

It covers values of Parameters, the cells' flags, and other attributes of cells: buffers and other Tensors, NumPy
arrays, numbers, and containers of these. Objects of other classes are not restored.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Container, Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.held_cells import held_values
from gaccum_ms.backend.parameters import overwrite

# MindSpore's own attributes of a Cell, among them its compiled graphs; buffers are not among them.
OF_EVERY_CELL = frozenset(vars(nn.Cell())) - {"_buffers"}
CONTAINERS = (list, collections.deque, dict, set, np.ndarray)


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
                self._keep_value(parameter, self.parameters)
        cells = {id(cell): cell for root in roots for _, cell in root.cells_and_names()}
        self.flags = [(cell, cell.training, cell.requires_grad) for cell in cells.values()]
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each cell, and those that it had
        self._contents: list[tuple[Any, Any]] = []  # containers among them, and copies of these
        for cell in cells.values():
            self._keep_attributes(cell)
        self.generator = ms.get_rng_state()

    def restore_values(self, only: Container[int] | None = None) -> None:
        """Restore Parameters and all other state, without flags and generator. `only` : the ids of Parameters; others
        are left."""
        for attributes, own in self._attributes:
            for name in attributes.keys() - own.keys() - OF_EVERY_CELL:
                if not name.startswith("_"):  # these are MindSpore's notes from compiling
                    del attributes[name]
            attributes.update(own)
        for container, contents in self._contents:
            refill(container, contents)
        for key, (parameter, value) in self.parameters.items():
            if only is None or key in only:
                restore_value(parameter, value)
        for tensor, value in self.tensors.values():
            restore_value(tensor, value)

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

    def _keep_value(self, tensor: ms.Tensor, saved: dict[int, tuple[ms.Tensor, np.ndarray]]) -> None:
        if id(tensor) not in self._left_out and id(tensor) not in saved:
            saved[id(tensor)] = tensor, as_numpy(tensor)

    def _keep_attributes(self, cell: nn.Cell) -> None:
        held = [(name, value) for name, value in held_values(cell) if name.partition(".")[0] not in OF_EVERY_CELL]
        self._attributes.append((vars(cell), {name: value for name, value in held if name in vars(cell)}))
        for _, value in held:
            if isinstance(value, ms.Tensor) and not isinstance(value, ms.Parameter):
                self._keep_value(value, self.tensors)
            elif type(value) in CONTAINERS:
                self._contents.append((value, value.copy()))


def refill(container: Any, contents: Any) -> None:
    """Put back what the container's `copy` method has given."""
    if isinstance(container, np.ndarray):
        if container.flags.writeable:
            np.copyto(container, contents)
        return
    container.clear()
    add = container.update if isinstance(container, (dict, set)) else container.extend
    add(contents)


def restore_value(tensor: ms.Tensor, value: np.ndarray) -> None:
    """Write a value, unless the Tensor has it: most are constants, also in graphs, which need not see `set_data` ."""
    if not has_value(tensor, value):
        overwrite(tensor, ms.Tensor(value, tensor.dtype))


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
