"""The measure: one micro-batch runs forward and backward. Of every kind of loss it returns the same four:

    numerators      the loss times its seed; of several losses, each of them
    items           what the micro-batch weighs by: its samples, its count, or what the network has counted
    outputs         what the network returns for the user
    gradients       of the seeded loss

    kind            seed                            items
    mean            unit * items                    samples, or `count`
    sum             unit                            samples, or `count`
    ratio           unit                            what the network returns beside its loss
    several         one of these for each loss      one for each loss

A loss of the whole batch has a measure of its own, of two passes: grad_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.functional import typeof

from gaccum_ms.accumulation.outputs import check_aux, check_outputs, kinds_and_shapes
from gaccum_ms.backend.graphs import gradients_allowed
from gaccum_ms.backend.random_operators import with_other_seeds
from gaccum_ms.losses import counts
from gaccum_ms.options.options import Options
from gaccum_ms.splitting import micro_batches

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


class Measure(nn.Cell):
    """Runs the network on a micro-batch. `counted` : whether items are counted at run time; else shapes tell the
    samples."""

    may_be_copied = True
    ranks_share_a_loss = False

    def __init__(self, options: Options, network: nn.Cell, weights: ms.ParameterTuple, counted: bool) -> None:
        super().__init__(auto_prefix=False)
        self._made_with = options, weights
        self.network = network
        self.counted = counted
        self.has_no_count = options.own_count is None
        self.counts = nn.CellList(
            [counts.count_cell(count, options.first_axis) for count in options.counts], auto_prefix=False
        )
        self.loss_is_mean = options.loss_is_mean
        self.number = options.losses
        self.several = options.several_losses
        self.ratio = options.returns_ratio
        self.aux = options.aux
        self.first_aux = 1 + self.ratio
        self.rows_are_open = options.splits_in_python and not options.trims
        self.returns_more = self.several or self.ratio or self.aux
        if self.several:
            self.loss_weights = ms.Tensor(options.loss_weights, ms.float32)
            self.backward = ops.value_and_grad(self.seeded_losses, None, weights, has_aux=True)
            self.run_alone_on([network] * self.number)
        elif self.returns_more:  # only the first output has a gradient
            self.backward = ops.value_and_grad(self.seeded_outputs, None, weights, has_aux=True)
        else:
            self.backward = ops.value_and_grad(self.seeded_loss, None, weights)

    def run_alone_on(self, networks: Sequence[nn.Cell]) -> None:
        """Run each loss alone on its copy of the network, which draws its own random numbers."""
        options, weights = self._made_with
        alone = [_LossAlone(network, term, options.loss_weights) for term, network in enumerate(networks)]
        self.backward_of = tuple(ops.value_and_grad(network, None, weights, has_aux=True) for network in alone)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def total(self, inputs, plan):
        """The items of a batch, by which its window's unit is computed. NaN if a count is bad. If the network counts,
        the batch's samples stand for them."""
        return self.counted_total(inputs, plan) if self.counted else plan[micro_batches.SAMPLES]

    def counted_total(self, inputs, plan):
        """Each micro-batch is counted separately, so that a bad count is noticed."""
        total = ops.zeros((self.number,) if self.several else (), ms.float32)
        if self.has_no_count:
            return total + plan[micro_batches.SAMPLES]
        return micro_batches.add_up(self.count_of_part, (), (), total, inputs, plan)

    def count_of_part(self, of_loop, rows, *micro_batch):
        return self.count(*micro_batch)

    def count(self, *micro_batch):
        """The count of a micro-batch, NaN if it is bad; with several losses one for each."""
        if not self.several:
            return counts.valid_or_nan(self.counts[0](*micro_batch))
        items: tuple = ()
        for term in range(self.number):
            items = (*items, counts.valid_or_nan(self.counts[term](*micro_batch)))
        return ops.stack(items)

    def prepare(self, sums, unit, inputs, plan):
        """Before the loop: the initial sums, what all micro-batches share, and the inputs to cut."""
        return sums, (), inputs

    def items(self, rows, *micro_batch):
        """The items of a micro-batch before it runs; zero if the network counts them."""
        if not self.counted:
            return rows
        return ms.Tensor(0.0, ms.float32) if self.ratio else self.count(*micro_batch)

    def run(self, unit, prepared, rows, items, *micro_batch):
        """Forward and backward. Returns (numerators, items, outputs, gradients)."""
        seed = unit * items if self.loss_is_mean else unit
        if not self.returns_more:
            numerator, gradients = self.backward(seed, *micro_batch)
            return numerator, items, (), gradients
        return self.run_with_more(seed, rows, items, *micro_batch)

    def run_with_more(self, seed, rows, items, *micro_batch):
        if self.several:
            values, gradients = self.backward(seed, *micro_batch)
            return values[1], items, (), gradients
        values, gradients = self.backward(seed, rows, *micro_batch)
        if self.ratio:
            return values[0], values[1], values[2:], gradients
        return values[0], items, values[1:], gradients

    def run_alone(self, term, unit, items, *micro_batch):
        """One of several losses by itself. Returns (numerators, gradients)."""
        values, gradients = self.backward_of[term](unit * items if self.loss_is_mean else unit, *micro_batch)
        return values[1], gradients

    def seeded_loss(self, seed, *micro_batch):
        """The loss times its seed. Scaling the backward's seed costs no pass over the gradients. In low precision, too,
        each sample then has the same gradient as in the whole batch."""
        return float32_loss(self.network(*micro_batch)) * seed

    def seeded_losses(self, seeds, *micro_batch):
        """The weighted sum, from which backward runs, and each loss's part of its window mean."""
        parts = ops.stack(float32_losses(self.network(*micro_batch), self.number)) * seeds
        return ops.reduce_sum(parts * self.loss_weights), parts

    def seeded_outputs(self, seed, rows, *micro_batch):
        """The loss times its seed, the denominator of a ratio, and outputs, of which those of shape () are seeded."""
        outputs = self.network(*micro_batch)
        check_outputs(outputs, self.ratio, self.aux, None if self.rows_are_open else rows)
        result: tuple = (float32_loss(outputs[0]) * seed,)
        if self.ratio:
            result = (*result, counts.valid_or_nan(outputs[1]))
        for index in range(self.first_aux, len(outputs)):
            output = outputs[index]
            result = (*result, output if output.ndim > 0 else ops.cast(output, ms.float32) * seed)
        return result

    # -- not compiled --------------------------------------------------------------------------------------------------

    def copy(self, number: int) -> Measure:
        """The measure on a copy of the network, which draws other random numbers; the first is the network itself."""
        options, weights = self._made_with
        first = number * (1 + self.number)
        network = with_other_seeds(self.network, first) if number else self.network
        with gradients_allowed():
            copied = Measure(options, network, weights, self.counted)
            if self.several:
                copied.run_alone_on([with_other_seeds(network, first + 1 + term) for term in range(self.number)])
        return copied

    @property
    def network_of_rows(self) -> nn.Cell | None:
        """The network whose outputs are joined."""
        return self.network if self.aux else None

    def check_shapes(self, shapes: Sequence[tuple[int, ...] | None], rows: int) -> None:
        """Check the shapes of its outputs for `rows` samples."""
        check_aux(shapes, self.ratio, rows)
