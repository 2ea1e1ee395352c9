"""The training step: the order of one update, and the one compiled loop that runs it.

    split the batch
    for each micro-batch:
        forward, backward                     seeded with its share of the samples, so that the sum is the mean
        add to the accumulators
    reduce across ranks, once
    clip
    update
    clear the accumulators

The loop is a ``while`` inside the graph: its body is compiled once, so compile time and memory do not grow with the
number of micro-batches. Everything from `construct` down is parsed by graph mode. Three rules keep it right there:
values are carried as ``a = a + b``, because ``a += b`` on a constant Tensor writes into the constant, which lives on
in the compiled graph; side effects are ordered by `ops.depend`; what depends on shapes alone is a constant.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import accumulator, clip, split
from gaccum_ms.batchnorm import warn_about_batch_norm
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.parallel import check_parallel_mode

_cast_like = ops.MultitypeFuncGraph("gaccum_ms_cast_like")


@_cast_like.register("Tensor", "Tensor")
def _cast_like_one(gradient, weight):
    return ops.cast(gradient, weight.dtype)


@ops.constexpr
def _check_loss(shape):
    if shape != ():
        raise ValueError(
            f"For 'GradAccumulationCell', the network must return a scalar loss of shape (), but got shape {shape}. "
            f"Use a loss with reduction='mean', or take the mean in the network."
        )


class TrainOneStepWithGradAccumulationCell(nn.TrainOneStepCell):
    r"""
    The training step of a :class:`GradAccumulationCell`: one call, one batch, one update.

    Parameters, optimizer state and loss end where `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/
    api_python/nn/mindspore.nn.TrainOneStepCell.html>`_ would leave them on the whole batch, to float32 rounding; see
    the README for where that cannot hold. In data parallel mode gradients are reduced once per update, by MindSpore's
    own reducer, which obeys ``gradients_mean``.

    Args:
        network (GradAccumulationCell): The network with its loss and the options of accumulation.
        optimizer (Optimizer): Any `nn.Optimizer` over the network's parameters.

    Inputs:
        - **\*inputs** (Tensor) - The batch. Each input has shape :math:`(N, ...)` with the same :math:`N`; all are
          split along axis 0 at the same boundaries.

    Outputs:
        Tensor of shape :math:`()`, float32: the loss of the whole batch, its mean over the samples.

    Raises:
        TypeError: If `network` is not a GradAccumulationCell, `optimizer` not an Optimizer, or an input not a Tensor.
        ValueError: If the optimizer has no parameter of the network; if an input has no axis 0 or its length differs
            from the others'; if the first batch has fewer samples than `micro_size`; if the loss is not a scalar.
        RuntimeError: In semi-auto and auto parallel mode, or with pipeline stages.

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

    def __init__(self, network: GradAccumulationCell, optimizer: nn.Optimizer) -> None:
        if not isinstance(network, GradAccumulationCell):
            raise TypeError(
                f"For 'TrainOneStepWithGradAccumulationCell', the argument 'network' must be a "
                f"gaccum_ms.GradAccumulationCell, but got '{type(network).__name__}'."
            )
        _check_optimizer(network, optimizer)
        check_parallel_mode()
        super().__init__(network.network, optimizer)
        self._micro_size = network.micro_size
        self._micro_batch_size = network.micro_batch_size
        self._max_grad_norm = network.max_grad_norm
        self._jit = bool(network.jit)
        self._seen_full_batch = False
        self._map = ops.HyperMap()
        self._whole_batch = ops.value_and_grad(self._loss, None, self.weights)
        self._micro_batch = ops.value_and_grad(self._share_of_loss, None, self.weights)
        if network.accumulates:
            self.accu_grads = accumulator.allocate(self.weights, ms.float32)
            warn_about_batch_norm(network)

    def __call__(self, *inputs):
        self._check_batch(inputs)
        if self._jit and ms.get_context("mode") == ms.PYNATIVE_MODE:
            # PyNative's tape, left open by any eager gradient before, would record the compiled step to differentiate
            # it once more.
            with ms.common._no_grad():
                return super().__call__(*inputs)
        return super().__call__(*inputs)

    def _check_batch(self, inputs) -> None:
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

    def construct(self, *inputs):
        if self._jit:
            return self._compiled_step(*inputs)
        return self._step(*inputs)

    @ms.jit
    def _compiled_step(self, *inputs):
        return self._step(*inputs)

    def _step(self, *inputs):
        """The order of one update."""
        shapes = [value.shape for value in inputs]
        samples, size, full, rest = split.compiled_plan(shapes, self._micro_size, self._micro_batch_size)
        if full == 1 and rest == 0:
            loss, gradients = self._whole_batch(*inputs)
            return ops.depend(loss, self._update(gradients))
        loss = self._accumulate(inputs, samples, size, full, rest)
        gradients = self._map(_cast_like, ops.depend(self.accu_grads, loss), self.weights)
        updated = self._update(gradients)
        cleared = self._map(accumulator.clear, ops.depend(self.accu_grads, updated))
        return ops.depend(loss, cleared)

    def _accumulate(self, inputs, samples, size, full, rest):
        """Forward, backward and add for each micro-batch; returns the whole batch's loss."""
        share = ms.Tensor(size / samples, ms.float32)
        stacked = split.stack_full(inputs, size, full, rest)
        loss = ms.Tensor(0.0, ms.float32)
        index = ms.Tensor(0, ms.int32)
        while index < full:
            loss = loss + self._micro_step(share, split.take(stacked, index))
            index = index + 1
        if rest > 0:
            loss = loss + self._micro_step(
                ms.Tensor(rest / samples, ms.float32), split.take_rest(inputs, full * size)
            )
        return loss

    def _micro_step(self, share, micro_batch):
        loss, gradients = self._micro_batch(share, *micro_batch)
        return ops.depend(loss, self._map(accumulator.add, self.accu_grads, gradients))

    def _update(self, gradients):
        """Reduce across ranks, clip, hand to the optimizer."""
        gradients = self.grad_reducer(gradients)
        if self._max_grad_norm is not None:
            gradients = clip.clip_by_norm(gradients, clip.global_norm(gradients), self._max_grad_norm)
        return self.optimizer(gradients)

    def _loss(self, *inputs):
        loss = self.network(*inputs)
        _check_loss(loss.shape)
        return ops.cast(loss, ms.float32)

    def _share_of_loss(self, share, *micro_batch):
        """A micro-batch's part of the whole batch's mean. Scaled here, in the backward's seed, and not in a pass over
        the gradients: each sample then has the gradient that it has in the whole batch, in low precision too."""
        return self._loss(*micro_batch) * share


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
