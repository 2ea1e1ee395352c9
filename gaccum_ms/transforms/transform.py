"""Transform: one link of the chain that a finished gradient goes through, and the base of one's own."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.parameters import hold_weights, of_this_rank, own


class _KeepsArguments:
    """What was made of arguments, and can be made of them again."""

    _arguments: tuple[tuple, dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "_arguments", (args, kwargs))
        return made

    def another(self) -> Any:
        """One of the same arguments, for another step."""
        args, kwargs = self._arguments
        return type(self)(*args, **kwargs)


class Transform(_KeepsArguments, nn.Cell):
    r"""
    One link of the chain that a finished gradient goes through; a class of one's own begins here.

    The gradient is finished when it is reduced over ranks, divided by the window's total count, and without loss scale.
    It then goes through `transforms` of :class:`GradAccumulationCell` in order, as through those that `optax.chain
    <https://optax.readthedocs.io/en/latest/api/combining_optimizers.html>`_ joins, once per update, in the step's own
    graph. A window that overflowed, or counted nothing, goes through none. A class of one's own has some of these
    methods, all but `prepare` compiled with the step:

    * ``prepare(network)`` , while the step is built: makes state. ``self.weights`` is there by then, in the order of
      the gradients. `network` is what the cell has, ``None`` in a :class:`GradAccumulator` .
    * ``allows(gradients)`` returns a bool Tensor of shape :math:`()` : whether there may be an update. It judges the
      gradients as the links before have left them. Where one link says no, the window is left out: nothing of weights,
      optimizer, learning rate and counts of updates changes.
    * ``change(gradients)`` returns the gradients that the next link gets.
    * ``after_update(after)`` acts when the optimizer has written the weights, and returns `after` , a Tensor, by
      `mindspore.ops.depend` on what it did. What must move only with an update belongs here.

    A class of your own takes the arguments that it needs, and calls ``super().__init__()`` in its constructor. All
    ranks must decide alike. What `state` makes is in checkpoints, and :func:`resume` goes on with it.

    Args:
        None.

    Inputs:
        - **gradients** (tuple[Tensor]) - Float32, one of each weight's shape, without loss scale.

    Outputs:
        tuple[Tensor], what `change` returns.

    Raises:
        ValueError: As the step is built, if another step has it, or if two keep state by one name.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, Transform
        >>> ms.set_context(mode=ms.PYNATIVE_MODE)  # graph mode reads source, which a prompt has in no file
        >>> class SignOnly(Transform):
        ...     def change(self, gradients):
        ...         return ops.HyperMap()(ops.sign, gradients)
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, transforms=(SignOnly(),))
        >>> step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.25)).set_train()
        >>> loss = step(Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> print(net.weight.asnumpy())
        [[0.75 0.75 0.75]]
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.in_step = False  # whether a step has it

    def begin(self, weights: ms.ParameterTuple, network: nn.Cell | None) -> None:
        """A step is built that has this link."""
        self.in_step = True
        hold_weights(self, weights)
        self.prepare(network)

    def state(self, name: str, value: np.ndarray) -> ms.Parameter:
        """A Parameter that checkpoints hold, as ``gaccum_ms.<name>`` , and that each rank has for itself.

        Args:
            name (str): Its name, which no other link may have.
            value (numpy.ndarray): What it begins with; gives shape and dtype.

        Returns:
            Parameter, not trained.
        """
        return of_this_rank(own(name), ms.Tensor(value))

    def prepare(self, network: nn.Cell | None) -> None:
        """Make what is needed, of ``self.weights`` and of the network."""

    def begin_anew(self) -> None:
        """Forget what training has left, before a checkpoint is loaded that may know nothing of it."""

    # -- compiled ------------------------------------------------------------------------------------------------------

    def allows(self, gradients):
        return True

    def change(self, gradients):
        return gradients

    def after_update(self, after):
        return after

    def construct(self, gradients):
        return self.change(gradients)
