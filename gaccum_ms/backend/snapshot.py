"""What is put back after a trial: values of Parameters, the cells' flags, the default generator. Bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.parameters import overwrite


class Snapshot:
    """Everything that a trial may change in some cells.

    Args:
        roots (Cell): The cells.
        leave_out (Iterable[Parameter]): Parameters that the trial does not write: they need no copy.
    """

    def __init__(self, *roots: nn.Cell, leave_out: Iterable[ms.Parameter] = ()) -> None:
        left_out = {id(one) for one in leave_out}
        self.parameters = {
            id(one): (one, as_numpy(one)) for root in roots for one in root.get_parameters() if id(one) not in left_out
        }
        self.flags = {
            id(one): (one, one.training, one.requires_grad) for root in roots for _, one in root.cells_and_names()
        }
        self.generator = ms.get_rng_state()

    def restore_parameters(self) -> None:
        for parameter, value in self.parameters.values():
            overwrite(parameter, ms.Tensor(value, parameter.dtype))  # compiled graphs need not see set_data

    def restore(self) -> None:
        self.restore_parameters()
        for cell, training, requires_grad in self.flags.values():
            cell.add_flags(training=training)  # set_train would set its children too
            nn.Cell.set_grad(cell, requires_grad)  # our cell's own refuses
        ms.set_rng_state(self.generator)


def as_numpy(tensor: ms.Tensor) -> np.ndarray:
    """A copy: asnumpy() alone may be a view that training goes on to change. bfloat16, which NumPy lacks: float32."""
    return np.array((tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy())
