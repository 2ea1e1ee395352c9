"""The training step: the order of one update.

    split the batch
    for each micro-batch:                       (window.py)
        forward, backward                       seeded with its share or count, times the loss scale
        add to the accumulators                 unless it counts nothing, or overflowed and is to be dropped
    reduce across ranks, once                   several counted losses: their counts too, before the loop
    divide by total count and loss scale
    clip by global norm
    finite, and something counted?              all ranks agree
        update, or skip
    adjust the loss scale
    clear the accumulators

Everything from `construct` down, here and in window.py, is parsed by graph mode into one graph with the loop in it. The
loop's body is compiled once, so compile time and memory do not grow with the number of micro-batches. Four rules keep
it right: values are carried as ``a = a + b``, because ``a += b`` on a constant Tensor writes into the constant, which
lives on in the compiled graph; side effects are ordered by `ops.depend`; what depends on shapes and options is decided
while compiling, by Python values; what depends on data is an ``if`` on a Tensor, and what it skips costs nothing.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import amp, nn, ops

from gaccum_ms import clip, split
from gaccum_ms.batchnorm import warn_about_batch_norm
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.counted_window import CountedWindow
from gaccum_ms.loss_scale import check_scale, scale_parameter
from gaccum_ms.multi_loss_window import MultiLossWindow
from gaccum_ms.parallel import broadcast_parameters, check_parallel_mode
from gaccum_ms.sparse import refuse_sparse_gradients
from gaccum_ms.window import SampleWindow, record

_divide = ops.MultitypeFuncGraph("gaccum_ms_divide")
_cast_like = ops.MultitypeFuncGraph("gaccum_ms_cast_like")


@_divide.register("Tensor", "Tensor")
def _divide_one(divisor, gradient):
    return ops.cast(gradient, ms.float32) / divisor


@_cast_like.register("Tensor", "Tensor")
def _cast_like_one(gradient, weight):
    return ops.cast(gradient, weight.dtype)


class TrainOneStepWithGradAccumulationCell(nn.TrainOneStepCell):
    r"""
    The training step of a :class:`GradAccumulationCell`: one call, one batch, one update.

    Parameters, optimizer state and loss end where `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/
    api_python/nn/mindspore.nn.TrainOneStepCell.html>`_ would leave them on the whole batch, to float32 rounding; see
    the README for where that cannot hold. In data parallel mode gradients are reduced once per update, by MindSpore's
    own reducer, which obeys ``gradients_mean``; with `count` , which is exact over ranks, they are always summed.

    Args:
        network (GradAccumulationCell): The network with its loss and the options of accumulation.
        optimizer (Optimizer): Any `nn.Optimizer` over the network's parameters.
        scale_sense (Union[Cell, Tensor], optional): Loss scale, as `nn.TrainOneStepWithLossScaleCell
            <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepWithLossScaleCell.html>`_
            takes it: a Cell that adjusts it, such as `nn.DynamicLossScaleUpdateCell` , or a Tensor of shape
            :math:`()` or :math:`(1,)`. The scale multiplies each micro-batch's backward and is divided out once.
            A window whose gradient is not finite does not update, on any rank. Default: ``None`` , no scaling and no
            check.

    Inputs:
        - **\*inputs** (Tensor) - The batch. Each input has shape :math:`(N, ...)` with the same :math:`N`; all are
          split along axis 0 at the same boundaries.

    Outputs:
        Tensor of shape :math:`()`, float32: the loss of the whole batch. With `scale_sense` , as MindSpore's step, a
        tuple of that loss; whether the window overflowed and did not update, a bool Tensor of shape :math:`()`; and
        the scale that it ran with, float32 of shape :math:`()`.

        Callbacks find the rest in Parameters of the step, all float32: ``grad_norm`` (with `max_grad_norm` ), the
        global norm before clipping; ``window_count`` (with `count` or ``overflow="drop_micro_batch"`` ), the total
        count of all ranks; ``dropped_micro_batches`` (likewise), how many were left out on all ranks; ``loss_terms``
        (with several losses), the window mean of each.

    Raises:
        TypeError: If `network` is not a GradAccumulationCell, `optimizer` not an Optimizer, `scale_sense` neither
            Cell nor Tensor, or an input not a Tensor.
        ValueError: If the optimizer has no parameter of the network; if an input has no axis 0 or its length differs
            from the others'; if the first batch has fewer samples than `micro_size`; if the loss is not a scalar; if
            a count is negative or not finite; if an embedding makes sparse gradients.
        RuntimeError: In semi-auto, auto and hybrid parallel mode, or with pipeline stages.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), micro_batch_size=2)
        >>> step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
        >>> loss = step(Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> print(loss)
        9.0
        >>> print(net.weight.asnumpy().round(4))
        [[0.4 0.4 0.4]]
    """

    def __init__(
        self, network: GradAccumulationCell, optimizer: nn.Optimizer, scale_sense: nn.Cell | ms.Tensor | None = None
    ) -> None:
        if not isinstance(network, GradAccumulationCell):
            raise TypeError(
                f"For 'TrainOneStepWithGradAccumulationCell', the argument 'network' must be a "
                f"gaccum_ms.GradAccumulationCell, but got '{type(network).__name__}'."
            )
        _check_optimizer(network, optimizer)
        check_parallel_mode()
        refuse_sparse_gradients(network)
        super().__init__(network.network, optimizer)
        self._micro_size = network.micro_size
        self._micro_batch_size = network.micro_batch_size
        self._max_grad_norm = network.max_grad_norm
        self._counts = tuple(count for count in network.counts if count is not None)
        self._jit = bool(network.jit)
        self._seen_full_batch = False
        self._ranks_agree = not self.reducer_flag
        self._map = ops.HyperMap()
        self.window = self._make_window(network)
        self._scaled = scale_sense is not None
        self._drops = network.overflow == "drop_micro_batch"
        self.loss_scaling_manager: Any = None
        if self._scaled:
            self.scale_sense, self.loss_scaling_manager = scale_parameter(scale_sense)
        if self._max_grad_norm is not None:
            self.grad_norm = record("grad_norm")
        if network.accumulates:
            warn_about_batch_norm(network)

    def _make_window(self, cell: GradAccumulationCell) -> SampleWindow:
        if cell.several_losses:
            return MultiLossWindow(cell, self.weights, self.grad_reducer)
        if cell.counted:
            return CountedWindow(cell, self.weights, self.grad_reducer)
        return SampleWindow(cell, self.weights, self.grad_reducer)

    @property
    def accu_grads(self) -> ms.ParameterTuple:
        """The accumulators; empty where there is nothing to accumulate over."""
        return getattr(self.window, "accu_grads", ms.ParameterTuple(()))

    @property
    def window_count(self) -> ms.Parameter:
        return self.window.window_count

    @property
    def dropped_micro_batches(self) -> ms.Parameter:
        return self.window.dropped_micro_batches

    @property
    def loss_terms(self) -> ms.Parameter:
        return self.window.loss_terms

    def set_sense_scale(self, sens: ms.Tensor) -> None:
        """Set the loss scale, as the method of this name of `nn.TrainOneStepWithLossScaleCell` does.

        Args:
            sens (Tensor): The new scale, of the shape of the old one.
        """
        if not self._scaled or not isinstance(sens, ms.Tensor) or sens.shape != self.scale_sense.shape:
            raise TypeError(
                f"For 'TrainOneStepWithGradAccumulationCell', 'set_sense_scale' needs a step that was made with "
                f"'scale_sense', and a Tensor of its shape, but got {sens!r}."
            )
        check_scale(sens)
        ops.assign(self.scale_sense, sens.astype(ms.float32))  # a compiled graph would not see set_data

    def __call__(self, *inputs):
        self._check_batch(inputs)
        try:
            outputs = self._run(*inputs)
        except BaseException:
            self.window.forget()  # what the window's first micro-batches left would be added to the next batch's
            raise
        if self._counts:
            self._check_count(inputs)
        return outputs

    def _run(self, *inputs: ms.Tensor) -> Any:
        if not self._ranks_agree and ms.get_context("mode") == ms.PYNATIVE_MODE:
            broadcast_parameters(self)
        self._ranks_agree = True
        if self._jit and ms.get_context("mode") == ms.PYNATIVE_MODE:
            # PyNative's tape, left open by any eager gradient before, would record the compiled step to differentiate
            # it once more.
            with ms.common._no_grad():
                return super().__call__(*inputs)
        return super().__call__(*inputs)

    def _check_batch(self, inputs: tuple[Any, ...]) -> None:
        """One clear error before anything runs. A first batch smaller than micro_size is a mistake, a later one a
        short last batch."""
        plan = split.plan_split(split.batch_shapes(inputs), self._micro_size, self._micro_batch_size)
        if self._micro_size is None or self._micro_size <= plan.samples:
            self._seen_full_batch = True
        elif not self._seen_full_batch:
            raise ValueError(
                f"For 'GradAccumulationCell', the argument 'micro_size' is the number of micro-batches and must not "
                f"be larger than the batch, but got micro_size={self._micro_size} and a batch of {plan.samples} "
                f"sample(s). Use a larger batch or a smaller 'micro_size'; samples per micro-batch are set by "
                f"'micro_batch_size'."
            )

    def _check_count(self, inputs: tuple[ms.Tensor, ...]) -> None:
        """The graph did not update with a bad count, on any rank; here the user learns of it."""
        total = self.window_count.asnumpy()
        if (total == total).all():
            return
        plan = split.plan_split(split.batch_shapes(inputs), self._micro_size, self._micro_batch_size)
        counted = [
            [
                float(count(*(value[start : start + plan.size] for value in inputs)))
                for start in range(0, plan.samples, plan.size)
            ]
            for count in self._counts
        ]
        raise ValueError(
            f"For 'GradAccumulationCell', 'count' must return a finite number of items that is not negative, but got "
            f"{counted} for the micro-batches of this rank (where these are fine, another rank's are not). Nothing was "
            f"changed: correct 'count' and go on."
        )

    # -- compiled ------------------------------------------------------------------------------------------------------

    def construct(self, *inputs):
        if self._jit:
            return self._compiled_step(*inputs)
        return self._step(*inputs)

    @ms.jit
    def _compiled_step(self, *inputs):
        return self._step(*inputs)

    def _step(self, *inputs):
        """The order of one update."""
        scale = self._scale()
        gradients, divisor, loss, counted = self.window.run(inputs, scale)
        if self._scaled or self.window.divides:
            gradients = self._map(ops.partial(_divide, divisor / self.sens), gradients)
        norm_is_finite = True
        if self._max_grad_norm is not None:
            gradients, loss, norm_is_finite = self._clip(gradients, loss)
        gradients = self._map(_cast_like, gradients, self.weights)
        overflow = self._overflow(gradients, loss, counted, norm_is_finite)
        if self.window.gated or self._scaled:
            if ops.logical_and(counted, ops.logical_not(overflow)):
                loss = ops.depend(loss, self.optimizer(gradients))
        else:
            loss = ops.depend(loss, self.optimizer(gradients))
        if self.loss_scaling_manager is not None:
            loss = ops.depend(loss, self._adjust_scale(overflow, loss))
        loss = self.window.clear(loss)
        if self._scaled:
            return loss, overflow, scale
        return loss

    def _scale(self):
        """What seeds are multiplied with, shape (). `scale_sense` is divided out again; `sens` is left in the gradient
        for an optimizer with ``loss_scale``, which divides by it."""
        if self._scaled:
            return self.scale_sense.reshape(()) + 0.0  # its value now: the manager writes into the Parameter
        return ms.Tensor(self.sens, ms.float32)

    def _clip(self, gradients, loss):
        norm = clip.global_norm(gradients)
        loss = ops.depend(loss, ops.assign(self.grad_norm, norm / self.sens))
        return clip.clip_by_norm(gradients, norm, self._max_grad_norm * self.sens), loss, ops.isfinite(norm)

    def _overflow(self, gradients, loss, counted, norm_is_finite):
        """Whether the window must not update for what is not finite: the finished gradient, the same on all ranks, or
        its norm, or every micro-batch's. Without loss scaling nobody asks."""
        if not self._scaled and not self._drops:
            return ms.Tensor(False, ms.bool_)
        overflow = ops.logical_not(ops.logical_and(amp.all_finite(gradients), norm_is_finite))
        if self._drops:
            overflow = ops.logical_or(overflow, ops.logical_and(self._dropped(loss), ops.logical_not(counted)))
        return overflow

    def _dropped(self, after):
        return ops.depend(self.window.dropped_micro_batches, after) > 0

    def _adjust_scale(self, overflow, loss):
        """Let the manager see the window, unless its count was bad: then nothing is to change."""
        if self._drops:
            overflow = ops.logical_or(overflow, self._dropped(loss))
        overflow = ops.depend(overflow, loss)
        if not self.window.gated:
            return self.loss_scaling_manager(self.scale_sense, overflow)
        if (ops.depend(self.window.window_count, loss) >= 0).all():
            overflow = ops.depend(overflow, self.loss_scaling_manager(self.scale_sense, overflow))
        return overflow


def _check_optimizer(network: nn.Cell, optimizer: nn.Optimizer) -> None:
    parameters = getattr(optimizer, "parameters", None)
    if parameters is None:
        raise TypeError(
            f"For 'TrainOneStepWithGradAccumulationCell', the argument 'optimizer' must be an nn.Optimizer, but got "
            f"'{type(optimizer).__name__}'."
        )
    own = {id(parameter) for parameter in network.get_parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        raise ValueError(
            f"For 'TrainOneStepWithGradAccumulationCell', the optimizer must have at least one parameter of the "
            f"network, but got an optimizer with {len(parameters)} parameter(s), none of them the network's: nothing "
            f"would be trained. Make the optimizer from this network's 'trainable_params()'."
        )
