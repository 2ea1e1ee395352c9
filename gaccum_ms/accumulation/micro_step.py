"""The micro-step of a window: forward and backward of one micro-batch, with one loss or several.

There are two more kinds: outputs.py has the one for networks that return more than losses, grad_cache.py the one for a
loss that needs all samples of the batch at once. A micro-step has three methods:

* `prepare` runs before the loop. It returns the initial sums, what all micro-batches share, and the inputs to cut.
* `run` runs for each micro-batch. It returns the micro-batch's part of the sums, and its gradients.
* `check_plan` , if a kind has it, runs in Python before a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.functional import typeof

from gaccum_ms.options.options import Options

# Graph mode's type names, for values that a network may return by mistake.
_KINDS = {"Dict": "a dict", "TypeNone": "None", "Float": "a number", "Int": "a number", "Bool": "a bool"}
_KINDS |= {"String": "a str", "Tuple": "a tuple", "List": "a list"}


@ops.constexpr
def _check_losses(kinds, shapes, number):
    for kind, shape in zip(kinds, shapes, strict=True):
        if shape is None:
            name = type(kind).__name__
            raise TypeError(
                f"For 'GradAccumulationCell', the network must return its loss, a Tensor of shape (), or a tuple of "
                f"such losses, but got {_KINDS.get(name, name)}. Return what the loss function returns, and nothing "
                f"else: of a dict the entry that is the loss, of a Python number the Tensor it was computed from."
            )
    if len(shapes) != number:
        raise ValueError(
            f"For 'GradAccumulationCell', the network must return {number} loss(es), by 'count' and 'loss_weights', "
            f"but got {len(shapes)} output(s). Give one entry of 'loss_weights' for each loss, and set "
            f"aux=True if the others are no losses."
        )
    for kind, shape in zip(kinds, shapes, strict=True):
        if shape != ():
            raise ValueError(
                f"For 'GradAccumulationCell', the network must return a scalar loss of shape (), but got shape "
                f"{shape}. Use a loss with reduction='mean', or take the mean in the network. To a network that has no "
                f"loss, give one: ms.Model(cell, loss_fn, optimizer)."
            )
        if kind.element_type() not in ms.common.dtype.float_type:
            raise TypeError(
                f"For 'GradAccumulationCell', the network must return a loss of a float dtype, but got "
                f"{kind.element_type()}, through which no gradient comes. Cast nothing in the loss to integers."
            )


def kinds_and_shapes(values):
    """The type of each, and the shape of each that is a Tensor, else None. A comprehension would take the compiler
    longer: it is a loop there."""
    kinds: tuple = ()
    shapes: tuple = ()
    for value in values:
        kinds = (*kinds, typeof(value))
        shapes = (*shapes, value.shape if isinstance(value, ms.Tensor) else None)
    return kinds, shapes


def float32_losses(losses, number):
    """The network's losses (a Tensor or a tuple) as a tuple of float32 Tensors, checked to be `number` scalars."""
    if not isinstance(losses, (tuple, list)):
        losses = (losses,)
    kinds, shapes = kinds_and_shapes(losses)
    _check_losses(kinds, shapes, number)
    result: tuple = ()
    for loss in losses:
        result = (*result, ops.cast(loss, ms.float32))
    return result


def float32_loss(loss):
    """The network's only loss as a float32 Tensor, checked to be a scalar."""
    if not isinstance(loss, (tuple, list)):  # without the loops over losses: fewer functions in a graph
        _check_losses((typeof(loss),), (loss.shape if isinstance(loss, ms.Tensor) else None,), 1)
        return ops.cast(loss, ms.float32)
    return float32_losses(loss, 1)[0]


class OneLoss(nn.Cell):
    """The network returns one loss. A micro-batch's part of the sums is the loss times its seed."""

    def __init__(self, options: Options, network: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_is_mean = options.loss_is_mean
        self.backward = ops.value_and_grad(self.seeded_loss, None, weights)

    def prepare(self, sums, unit, inputs, plan):
        return sums, (), inputs

    def run(self, seed, prepared, size, *micro_batch):
        return self.backward(seed, *micro_batch)

    def seeded_loss(self, seed, *micro_batch):
        """The loss times its seed. Scaling the backward's seed costs no pass over the gradients. In low precision, too,
        each sample then has the same gradient as in the whole batch."""
        return float32_loss(self.network(*micro_batch)) * seed


class _LossAlone(nn.Cell):
    """One of several losses, with its own backward graph, which a NaN of another loss cannot enter."""

    def __init__(self, network: nn.Cell, term: int, loss_weights: Sequence[float]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.term = term
        self.weight = loss_weights[term]
        self.number = len(loss_weights)

    def construct(self, seeds, *micro_batch):
        part = float32_losses(self.network(*micro_batch), self.number)[self.term] * ops.unstack(seeds)[self.term]
        zero = ops.zeros_like(part)  # not zero times the part, which may be infinite
        return part * self.weight, ops.stack((zero,) * self.term + (part,) + (zero,) * (self.number - 1 - self.term))


class SeveralLosses(nn.Cell):
    """The network returns several losses; backward runs from their weighted sum. A micro-batch's part of the sums is
    each loss times its seed."""

    def __init__(self, options: Options, network: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_is_mean = options.loss_is_mean
        self.number = options.losses
        self.loss_weights = ms.Tensor(options.loss_weights, ms.float32)
        self.backward = ops.value_and_grad(self.seeded_losses, None, weights, has_aux=True)
        self.run_alone_on([network] * self.number, options, weights)

    def run_alone_on(self, networks: Sequence[nn.Cell], options: Options, weights: ms.ParameterTuple) -> None:
        """Run each loss alone on its copy of the network, which draws its own random numbers."""
        alone = [_LossAlone(network, term, options.loss_weights) for term, network in enumerate(networks)]
        self.backward_of = tuple(ops.value_and_grad(network, None, weights, has_aux=True) for network in alone)

    def prepare(self, sums, unit, inputs, plan):
        return sums, (), inputs

    def run(self, seeds, prepared, size, *micro_batch):
        value, gradients = self.backward(seeds, *micro_batch)
        return value[1], gradients

    def run_alone(self, term, seeds, *micro_batch):
        value, gradients = self.backward_of[term](seeds, *micro_batch)
        return value[1], gradients

    def seeded_losses(self, seeds, *micro_batch):
        """The weighted sum, from which backward runs, and each loss's part of its window mean."""
        parts = ops.stack(float32_losses(self.network(*micro_batch), self.number)) * seeds
        return ops.reduce_sum(parts * self.loss_weights), parts
