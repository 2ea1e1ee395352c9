"""An average of the weights, which moves with each update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.checks.arguments import check_bool, check_number, check_positive_finite
from gaccum_ms.cpu.kernels import add_in_place
from gaccum_ms.transforms.transform import Transform

_NAME = "WeightAverage"
PREFIX = "average."  # between our own prefix and the weight's name

_begin_at = ops.MultitypeFuncGraph("gaccum_ms_begin_average")
_move_to = ops.MultitypeFuncGraph("gaccum_ms_move_average")


def _or_begin(average, value):
    """Before the first update: the average where one was written, else the value. NaN: nothing was written."""
    return ops.select(ops.isnan(average), ops.cast(value, ms.float32), average)


@_begin_at.register("Tensor", "Tensor")
def _begin_one(average: ms.Parameter, value: ms.Tensor) -> ms.Tensor:
    return ops.assign(average, _or_begin(average, value))


@_move_to.register("Tensor", "Tensor", "Tensor")
def _move_one(rate: ms.Tensor, average: ms.Parameter, value: ms.Tensor) -> ms.Tensor:
    return add_in_place(average, (ops.cast(value, ms.float32) - average) * rate)


class WeightAverage(Transform):
    r"""
    Keep an exponential moving average of the weights, for evaluation and export.

    After update :math:`n` , counted from 1, the average :math:`a` of a weight :math:`w` is

    .. math::
        a_n = d_n a_{n-1} + (1 - d_n) w_n

    Here :math:`a_0` is the weight (or buffer) before the first update, or what was written into the average before it,
    and :math:`d_n` the decay, or with `warmup` :math:`\min(\text{decay}, (1 + n) / (10 + n))` , as in `TensorFlow's
    ExponentialMovingAverage <https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage>`_ . The
    average moves once per update: not with a micro-batch, and not with a dropped window. So it equals, to float32
    rounding, the average of training on whole batches.

    ``with step.averaged_weights():`` swaps the averages in, for `Model.eval` , a hand-written loop or an export, and
    restores the weights at its end. `Model.fit` evaluates with the averages automatically. The gradients are not
    changed. The averages are float32, also if the weights are not; they are whole on each rank, also with a
    :class:`ShardedOptimizer` ; checkpoints have them as ``gaccum_ms.average.<weight>`` . After a :func:`resume` from a
    checkpoint without averages, they start from the loaded weights.

    Args:
        decay (float): The part of the average that an update keeps, at least 0 and less than 1. Default: ``0.9999`` .
        warmup (Union[bool, float]): Whether the decay begins small; or the number of updates :math:`T` in which it
            approaches `decay` . Default: ``False`` .
        buffers (bool): Whether to average the network's other Parameters too, such as the moving statistics of
            BatchNorm: all Parameters of a float dtype that the optimizer does not update. Default: ``False`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The finished gradients, float32.

    Outputs:
        tuple[Tensor], the gradients as they came.

    Raises:
        TypeError: If `decay` is not a number, `warmup` neither a bool nor a number, or `buffers` not a bool.
        ValueError: If `decay` is not at least 0 and less than 1, or `warmup` not positive and finite; when the step is
            built, if `buffers` is given in a :class:`GradAccumulator` , which has no network.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WeightAverage
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, transforms=(WeightAverage(0.5),))
        >>> step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.1)).set_train()
        >>> loss = step(Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> with step.averaged_weights():
        ...     print(net.weight.asnumpy().round(4))
        [[0.7 0.7 0.7]]
        >>> print(net.weight.asnumpy().round(4))
        [[0.4 0.4 0.4]]
    """

    elementwise = True

    def __init__(self, decay: float = 0.9999, warmup: bool | float = False, buffers: bool = False) -> None:
        super().__init__()
        check_number(_NAME, "decay", decay)
        if not 0 <= decay < 1:
            raise ValueError(
                f"For '{_NAME}', the argument 'decay' must be at least 0 and less than 1, but got {decay}. It is what "
                f"an update keeps of the average: 0.9999 averages over some 10000 updates."
            )
        if not isinstance(warmup, bool):
            check_positive_finite(_NAME, "warmup", warmup)
        check_bool(_NAME, "buffers", buffers)
        self.decay = decay
        self.warmup, self.with_buffers = warmup, buffers
        self.swapped = False  # whether the averages have replaced the weights

    def prepare(self, network: nn.Cell | None) -> None:
        averaged = [weight for weight in self.weights if id(weight) not in self._of_other_stages]
        averaged += self._buffers_of(network) if self.with_buffers else ()
        # Only as an attribute, because these Parameters are the network's.
        object.__setattr__(self, "averaged", ms.ParameterTuple(averaged))
        # NaN: nothing was written.
        averages = [self.state_like(PREFIX + parameter.name, parameter, float("nan")) for parameter in averaged]
        self.averages = ms.ParameterTuple(averages)
        self.averaged_updates = self.state("averaged_updates", np.zeros((), np.int32))
        self.map = ops.HyperMap()

    def _buffers_of(self, network: nn.Cell | None) -> list[ms.Parameter]:
        if network is None:
            raise ValueError(
                f"For '{_NAME}', the argument 'buffers' must be False in a GradAccumulator, which has the optimizer's "
                f"weights and no network, but got True. Leave it out, or train by a GradAccumulationCell."
            )
        trained = {id(weight) for weight in self.weights}
        floats = (ms.float32, ms.float16, ms.bfloat16)
        # Parameters of one rank, such as the sums of an open window, are no state of the network.
        return [
            parameter
            for parameter in network.get_parameters()
            if id(parameter) not in trained and parameter.dtype in floats and not parameter.layerwise_parallel
        ]

    def begin_anew(self) -> None:
        overwrite(self.averaged_updates, ops.zeros_like(self.averaged_updates))
        for average in self.averages:
            overwrite(average, ops.full_like(average, float("nan")))

    # -- compiled ------------------------------------------------------------------------------------------------------

    def before_update(self, gradients):
        """At the first update, set the averages to the weights before it, which may have been loaded late; an average
        that was written stays."""
        begun = ms.Tensor(0.0, ms.float32)
        if self.averaged_updates + 0 == 0:
            begun = ops.depend(begun, self.map(_begin_at, self.averages, self.averaged))
        return ops.depend(gradients, begun)

    def after_update(self, after):
        updates = self.averaged_updates + 1
        moved = self.map(
            ops.partial(_move_to, self.rate_of(ops.cast(updates, ms.float32))),
            self.averages,
            ops.depend(self.averaged, after),
        )
        return ops.depend(after, ops.assign(self.averaged_updates, ops.depend(updates, moved)))

    def rate_of(self, update):
        """One minus the decay of an update. `update` is counted from 1."""
        rate = ms.Tensor(1.0 - self.decay, ms.float32)
        if isinstance(self.warmup, bool):
            if self.warmup:  # 1 - (1 + n) / (10 + n), if it is larger
                rate = ops.maximum(rate, 9.0 / (10.0 + update))
        else:
            rate = rate + self.decay * ops.exp(-update / self.warmup)
        return rate

    # -- not compiled --------------------------------------------------------------------------------------------------

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Context manager in which the weights have the averages' values. Before the first update, an average that was
        not written equals its weight."""
        if self.swapped:
            yield
            return
        begun = int(self.averaged_updates.asnumpy()) > 0
        with no_grad():
            before = [parameter.copy() for parameter in self.averaged]
        self.swapped = True
        try:
            for parameter, average in zip(self.averaged, self.averages, strict=True):
                overwrite(parameter, (average if begun else _or_begin(average, parameter)).astype(parameter.dtype))
            yield
        finally:
            for parameter, value in zip(self.averaged, before, strict=True):
                overwrite(parameter, value)
            self.swapped = False
