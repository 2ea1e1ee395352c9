"""Transform: one link of the chain that a finished gradient passes, and the base class of user-defined links."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.parameters import hold_weights, of_this_rank, own
from gaccum_ms.distributed.ranks import compiler_distributes
from gaccum_ms.distributed.stages import owned_weights


class _KeepsArguments:
    """Keeps the constructor's arguments, to make an equal object."""

    _arguments: tuple[tuple, dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "_arguments", (args, kwargs))
        return made

    def another(self) -> Any:
        """A new object with the same arguments, for another step."""
        args, kwargs = self._arguments
        return type(self)(*args, **kwargs)


class Transform(_KeepsArguments, nn.Cell):
    r"""
    One link of the chain that a finished gradient passes; derive your own links from this class.

    The gradient is finished when it is reduced over ranks, divided by the window's total count, and without loss scale.
    It then passes the `transforms` of :class:`GradAccumulationCell` in order, as in `optax.chain
    <https://optax.readthedocs.io/en/latest/api/combining_optimizers.html>`_ , once per update, in the step's own
    graph. A window that overflowed, or counted nothing, passes none. A link overrides some of these methods; all but
    `prepare` are compiled with the step:

    * ``prepare(network)`` creates state, while the step is built. ``self.weights`` is already set, in the order of the
      gradients. `network` is the cell's network, ``None`` in a :class:`GradAccumulator` .
    * ``allows(gradients)`` returns a bool Tensor of shape :math:`()` : whether an update is allowed. It gets the
      gradients from the link before. If any link returns False, the window is skipped: weights, optimizer, learning
      rate and count of updates stay as they are.
    * ``change(gradients)`` returns the gradients for the next link.
    * ``before_update(gradients)`` runs if all links allow the update, before the optimizer. It returns the gradients,
      tied by `mindspore.ops.depend` to its side effects.
    * ``after_update(after)`` runs when the optimizer has written the weights. It returns the Tensor `after` , tied by
      `mindspore.ops.depend` to its side effects. What must change only with an update belongs here.

    A derived class takes the arguments that it needs, and calls ``super().__init__()`` in its constructor. All
    ranks must decide alike. Checkpoints have the Parameters of `state` and `state_like` , with which :func:`resume`
    continues. A compiled update does not write other values, such as a number or the entries of a list: they are
    refused there.

    In semi-auto and auto parallel mode a gradient is one device's part. A class with ``elementwise = True`` says that
    it treats each element of a gradient and of its weight by itself; other classes of yours are refused there.

    Args:
        None.

    Inputs:
        - **gradients** (tuple[Tensor]) - Float32, one of each weight's shape, without loss scale.

    Outputs:
        tuple[Tensor], the result of `change` .

    Raises:
        ValueError: When the step is built, if another step has this link, or if two links have state of the same name.

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

    elementwise = False

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.in_step = False  # whether a step has it

    def begin(self, weights: ms.ParameterTuple, network: nn.Cell | None) -> None:
        """Called when a step with this link is built."""
        self.in_step = True
        hold_weights(self, weights)
        owned = owned_weights(network, weights)
        self._of_other_stages = {id(weight) for weight, is_owned in zip(weights, owned, strict=True) if not is_owned}
        self.prepare(network)

    def state(self, name: str, value: np.ndarray) -> ms.Parameter:
        """A Parameter that checkpoints hold, as ``gaccum_ms.<name>`` . Each rank has its own.

        Args:
            name (str): Its name, which no other link may have.
            value (numpy.ndarray): The initial value; it defines shape and dtype.

        Returns:
            Parameter, not trained.
        """
        return of_this_rank(own(name), ms.Tensor(value))

    def state_like(self, name: str, weight: ms.Parameter, value: float = 0.0) -> ms.Parameter:
        """State with a number for each element of a weight. In semi-auto and auto parallel mode it lies on the devices
        as the weight does. A pipeline compiles no state of another stage's weight, so there it is refused.

        Args:
            name (str): Its name, which no other link may have.
            weight (Parameter): The weight.
            value (float): The initial value. Default: ``0.0`` .

        Returns:
            Parameter, float32, not trained.

        Raises:
            ValueError: If the weight is another stage's, in a pipeline.
        """
        if id(weight) in self._of_other_stages:
            raise ValueError(
                f"For '{type(self).__name__}', in a pipeline 'state_like' must be called for weights of this device's "
                f"stage, but got '{weight.name}', another stage's. Leave the transform out in a pipeline, or keep what "
                f"does not grow with the weights, with 'state'."
            )
        if not compiler_distributes():
            return self.state(name, np.full(weight.shape, value, np.float32))
        state = weight.clone(init=value)
        state.name, state.requires_grad = own(name), False
        state.set_dtype(ms.float32)
        return state

    def prepare(self, network: nn.Cell | None) -> None:
        """Create state, from ``self.weights`` and the network."""

    def begin_anew(self) -> None:
        """Reset the state, before a checkpoint is loaded that may lack it."""

    # -- compiled ------------------------------------------------------------------------------------------------------

    def allows(self, gradients):
        return True

    def change(self, gradients):
        return gradients

    def before_update(self, gradients):
        return gradients

    def after_update(self, after):
        return after

    def construct(self, gradients):
        return self.change(gradients)
