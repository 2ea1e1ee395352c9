"""A window whose loss needs all samples of the batch at once: GradCache (Gao et al., 2021, arXiv:2101.06983).

    for each micro-batch: forward                   keep its representations, and no activations
    loss of all representations                     and its gradient with respect to them, called slopes (small)
    for each micro-batch: forward, backward         seeded with its slopes
        add to the accumulators

By the chain rule the sum is the whole batch's gradient: the loss depends on the weights only through the
representations and through the Parameters of `loss_fn` . The second loop adds the latter's gradient in shares.

Representations are gathered without an index: each micro-batch's rows are appended, and as many rows are removed in
front. The last micro-batch runs first, outside the loop, because it shows the shapes and dtypes. A representation of
shape (), such as a temperature, is the same for all micro-batches and is kept once.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.measure import float32_loss
from gaccum_ms.backend import no_grad
from gaccum_ms.distributed.layout import gather_json
from gaccum_ms.layers.window_batchnorm import window_statistics
from gaccum_ms.losses.batch_loss import (
    FLOATS,
    MOST_REPRESENTATIONS,
    WithBatchLossCell,
    check_ranks,
    check_rows,
    check_rows_in_graph,
)
from gaccum_ms.splitting import micro_batches


class _Forward(nn.Cell):
    """The backbone without a backward.

    In PyNative mode nothing is recorded: after a gradient raised, the open tape would keep activations. In a graph, the
    representations are an auxiliary output of a gradient that needs no backward. As a plain call, MindSpore's compiler
    would take it for the forward of the second pass, and lose a Parameter ("Illegal AnfNode for evaluating"), in a
    process that has compiled ``x += y`` and ``x[0]`` of a Tensor.
    """

    def __init__(self, network: WithBatchLossCell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.with_gradient = ops.value_and_grad(self.beside, 0, None, has_aux=True)

    def __call__(self, *inputs):
        with no_grad():
            return self.network.represent(*inputs)

    def construct(self, *inputs):
        return self.with_gradient(ms.Tensor(0.0, ms.float32), *inputs)[0][1:]

    def beside(self, zero, *inputs):
        return (zero, *self.network.represent(*inputs))


class TwoPasses(nn.Cell):
    """The measure of a loss that all samples of the batch share. The sums contain this loss times its seed, once."""

    loss_is_mean = False  # the loss is no mean over micro-batches
    may_be_copied = False  # both passes must draw the same

    def __init__(self, network: WithBatchLossCell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        check_ranks(network)
        self.network = network
        self.ranks_share_a_loss = network.ranks > 1
        self.whole = ops.value_and_grad(self.seeded_loss, None, weights)
        self.forward = _Forward(network)
        of_loss = {id(parameter) for parameter in self.network.loss_fn.get_parameters()}
        self.loss_weights = ms.ParameterTuple([weight for weight in weights if id(weight) in of_loss])
        self.loss_has_weights = len(self.loss_weights) > 0
        # One for each number of representations: `ops.value_and_grad` takes the inputs' positions before any call.
        self.slopes_of = tuple(
            ops.value_and_grad(
                self.seeded_batch_loss,
                tuple(range(1, number + 1)),
                self.loss_weights if self.loss_has_weights else None,
            )
            for number in range(1, MOST_REPRESENTATIONS + 1)
        )
        self.pull_back = ops.value_and_grad(self.along_slopes, None, weights)
        self.statistics = window_statistics(self.network.backbone)
        # If ranks share one loss, its gradient is the sum of their parts, and the loss multiplies each part by the
        # number of ranks (see batch_loss.py). This share divides by it if `gradients_mean` does not.
        mean = ms.get_auto_parallel_context("gradients_mean")
        self.share_of_ranks = 1.0 if mean else 1.0 / self.network.ranks

    # -- compiled ------------------------------------------------------------------------------------------------------

    def total(self, inputs, plan):
        return plan[micro_batches.SAMPLES]

    def items(self, rows, *micro_batch):
        return rows

    def prepare(self, sums, unit, inputs, plan):
        """The first pass, and the loss. A batch of one micro-batch needs no first pass."""
        if plan[micro_batches.WHOLE]:
            return sums, (), inputs
        samples, last = plan[micro_batches.SAMPLES], micro_batches.rows_at_the_end(plan)
        seed = unit * self.share_of_ranks
        representations = self.representations(inputs, samples - last, last, plan)
        loss, slopes, loss_slopes = self.slopes(seed, representations)
        if self.statistics is not None:
            loss = self.statistics.reset(loss)  # the second pass adds them again
        return sums + loss / self.share_of_ranks, (samples, len(inputs), loss_slopes), (*inputs, *slopes)

    def run(self, unit, prepared, rows, items, *part):
        """The second pass; the loss is in the sums already."""
        if len(prepared) == 0:
            loss, gradients = self.whole(unit * self.share_of_ranks, *part)
            return loss / self.share_of_ranks, items, (), gradients
        samples, number, loss_slopes = prepared
        gradients = self.pull_back(rows / samples, loss_slopes, number, *part)[1]
        return ops.zeros_like(unit), items, (), gradients

    def seeded_loss(self, seed, *batch):
        return float32_loss(self.network(*batch)) * seed

    def representations(self, inputs, before, rows_of_last, plan):
        """The first pass. Returns the representations of the batch. `before` : samples before the last micro-batch."""
        size, axes = plan[micro_batches.SIZE], plan[micro_batches.AXES]
        last = self.forward(*micro_batches.take_rest(inputs, before, axes))
        known_rows = None if isinstance(rows_of_last, ms.Tensor) else rows_of_last
        check_rows_in_graph([representation.shape for representation in last], known_rows, self.network.ranks)
        # One tuple, with a scalar in it: graph mode forgets the length of a tuple of equal shapes that a loop carries.
        state: tuple = (ms.Tensor(0, ms.int32), ms.Tensor(False))
        has_shared = False
        for index in range(len(last)):
            representation = last[index]
            rows = int(before)  # a Tensor if the batch has open length; MindSpore 2.7's zeros take none
            if representation.ndim > 0:
                representation = ops.zeros((rows, *representation.shape[1:]), representation.dtype)
            else:
                has_shared = True
            state = (*state, representation)
        while state[0] < before:
            state = self.appended(state, self.forward(*micro_batches.take(inputs, state[0], size, axes)), size)
        representations = self.appended(state, last, 0)[2:]
        return _checked(state[1], representations) if has_shared else representations  # no branch within the loop

    def appended(self, state, new, rows):
        """The start of the next micro-batch; whether one of shape () has differed; and the Tensors without their first
        `rows` rows, with `new` appended."""
        differs = state[1]
        following: tuple = ()
        for index in range(len(new)):
            before = state[index + 2]
            if new[index].ndim > 0:
                following = (*following, ops.concat((before[rows:], new[index])))
            else:
                both_nan = ops.logical_and(before != before, new[index] != new[index])
                differs = ops.logical_or(differs, ops.logical_not(ops.logical_or(before == new[index], both_nan)))
                following = (*following, before)
        return (state[0] + rows, differs, *following)

    def slopes(self, unit, representations):
        """The loss of the batch times its seed, and its gradients with respect to each representation of a float dtype,
        and to what all micro-batches share: the Parameters of `loss_fn` , then representations of shape ()."""
        loss_slopes: tuple = ()
        if self.loss_has_weights:
            loss, (gradients, loss_slopes) = self.slopes_of[len(representations) - 1](unit, *representations)
        else:
            loss, gradients = self.slopes_of[len(representations) - 1](unit, *representations)
        if isinstance(gradients, ms.Tensor):  # one representation gives no tuple
            gradients = (gradients,)
        slopes: tuple = ()
        for index in range(len(representations)):
            if representations[index].dtype in FLOATS:
                if representations[index].ndim > 0:
                    slopes = (*slopes, gradients[index])
                else:
                    loss_slopes = (*loss_slopes, gradients[index])
        return loss, slopes, loss_slopes

    def seeded_batch_loss(self, unit, *representations):
        return float32_loss(self.network.loss(*representations)) * unit

    def along_slopes(self, share, loss_slopes, number, *part):
        """A scalar whose gradient with respect to the weights is what this micro-batch adds."""
        total = ms.Tensor(0.0, ms.float32)
        slope = number
        shared = len(self.loss_weights)
        representations = self.network.represent(*part[:number])
        for index in range(len(representations)):
            representation = representations[index]
            if representation.dtype in FLOATS:
                representation = ops.cast(representation, ms.float32)
                if representation.ndim > 0:
                    total = total + ops.reduce_sum(representation * ops.cast(part[slope], ms.float32))
                    slope = slope + 1
                else:
                    total = total + ops.reduce_sum(representation * ops.cast(loss_slopes[shared], ms.float32)) * share
                    shared = shared + 1
        for index in range(len(self.loss_weights)):
            weight = ops.cast(self.loss_weights[index], ms.float32)
            total = total + ops.reduce_sum(weight * ops.cast(loss_slopes[index], ms.float32)) * share
        return total

    # -- not compiled --------------------------------------------------------------------------------------------------

    @property
    def network_of_rows(self) -> nn.Cell:
        """The network whose representations are joined."""
        return self.network.backbone

    def check_shapes(self, shapes: Sequence[tuple[int, ...] | None], rows: int) -> None:
        """Check the shapes of its representations of `rows` samples."""
        check_rows(shapes, rows, self.network.ranks)

    def check_plan(self, plan: micro_batches.SplitPlan) -> None:
        """Before a batch of ranks that share one loss: a collective."""
        samples = gather_json(plan.samples)
        if any(other != plan.samples for other in samples):
            raise ValueError(
                f"For 'WithBatchLossCell', with 'gather_ranks' all ranks must have batches of the same size, "
                f"because representations are gathered, but got {samples} samples on the ranks. Nothing was "
                f"changed. Drop last batches that differ (dataset.batch(..., drop_remainder=True))."
            )


def _checked(differs, representations):
    """The representations, if none of shape () was another in a later micro-batch."""
    if differs:
        raise ValueError(
            "For 'WithBatchLossCell', a representation of shape () must be the same for all micro-batches, but got "
            "another value for a later one. Return an entry for each sample; what is one for the whole batch belongs "
            "to 'loss_fn'. Nothing was updated."
        )
    return representations
