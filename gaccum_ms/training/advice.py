"""What a training step says about its network, once, at its first run: each kind of layer and loss has its own text.

It looks when the step first runs, and not when the step is built: by then layers are frozen, and `ms.Model.train` has
set the network to training.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.code_of_cells import named_cells
from gaccum_ms.backend.graphs import runs_eagerly
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.cell import check_inputs
from gaccum_ms.distributed.ranks import advice_about_ranks
from gaccum_ms.layers.batchnorm import advice_about_batch_norm
from gaccum_ms.layers.evaluation_mode import advice_about_evaluation_mode
from gaccum_ms.layers.hooks import advice_about_forward_hooks, advice_about_hooked_weights
from gaccum_ms.layers.state import advice_about_state
from gaccum_ms.layers.summaries import advice_about_summaries
from gaccum_ms.losses.batch_loss import advice_about_two_passes
from gaccum_ms.losses.known_losses import IgnoredLabels
from gaccum_ms.proof.first_batch import FirstBatch
from gaccum_ms.splitting.even_split import UNCUT, cut_axes

if TYPE_CHECKING:
    from gaccum_ms.options.options import Options
    from gaccum_ms.options.rules import Setup
    from gaccum_ms.training.runner import Batch


class AdviceOfLoop:
    """What an accumulator says, once, about ranks that nothing joins, and the networks of its loop, as far as it knows
    them. It looks at the first gradients, so that the loop may set the mode after it has made its functions."""

    def __init__(self, owner: str, weights: Sequence[ms.Parameter]) -> None:
        self._owner = owner
        self._weights = {id(weight) for weight in weights}
        self._networks: list[weakref.ref[nn.Cell]] = []
        self._looked_at_ranks = False

    def note(self, function: Callable[..., Any]) -> None:
        """Note a function that is differentiated, and its networks that have weights of the loop."""
        for network in named_cells(function).values():
            if self._weights.intersection(map(id, network.get_parameters())):
                self._networks.append(weakref.ref(network))

    def look(self) -> None:
        networks = [network for reference in self._networks if (network := reference()) is not None]
        self._networks = []
        of_ranks = None if self._looked_at_ranks else advice_about_ranks(self._owner)
        self._looked_at_ranks = True
        for text in (of_ranks, advice_about_evaluation_mode(self._owner, *networks)):
            if text is not None:
                warn_user(text)


class LossAdvice:
    """The advice about the losses of a network, or of a function of a loop: what the proof of its first batch measures;
    else labels that a loss of MindSpore's ignores, for which all batches of the first window are looked at. `owner` :
    the class in it; `counts` : what is counted; `batches` : those of a window."""

    def __init__(
        self, owner: str, function: Callable[..., Any], counts: Sequence[Any], batches: int, proof: FirstBatch
    ) -> None:
        self._find_labels = functools.partial(IgnoredLabels, owner, function, counts)
        self._labels: IgnoredLabels | None = None
        self._of_labels: str | None = None  # waits for what the proof says of the next batch
        self._batches = batches  # that are to be looked at
        self.proof = proof
        self.is_over = False  # whether something was said, or no later batch can tell anything

    def look(
        self,
        inputs: Sequence[Any],
        axes: Sequence[int] | None,
        micro_batches: Callable[[], Sequence[Sequence[Any]]],
        network_inputs: Sequence[Any] | None,
        count: float | None = None,
    ) -> None:
        """Look at a batch. `inputs` : of the step, with samples along `axes` ; `network_inputs` : None if they are not
        known, or `count` is the batch's, which a loop gives."""
        if self.is_over:
            return
        text = self.proof.look(inputs, axes, micro_batches, count)
        if self._batches > 0:
            self._batches -= 1
            self._labels = self._labels or self._find_labels()  # late: see above
            if network_inputs is not None:
                self._of_labels = self._of_labels or self._labels.advice(network_inputs)
        if text is None and not (self.proof.waits and self._batches > 0):  # after a window no batch may come
            text = self._of_labels
        if text is not None:
            warn_user(text)
        self.is_over = text is not None or (self._batches < 1 and self.proof.is_over)

    def look_in_loop(self, batch: Sequence[Any], count: ms.Tensor | None) -> None:
        """The same for a batch of a loop, which is a micro-batch of its window."""
        samples = batch[0].shape[0]
        has_samples = [isinstance(value, ms.Tensor) and value.ndim > 0 and len(value) == samples for value in batch]
        axes = [0 if of_samples else UNCUT for of_samples in has_samples]
        if count is None:
            self.look(batch, axes, lambda: [batch], batch)
        else:
            self.look(batch, axes, lambda: [batch], None, float(count.asnumpy()))


def proof_of_loop(owner: str, function: Callable[..., Any], options: Options, batches: int) -> FirstBatch:
    """The proof of a function of a loop, whose windows have so many batches."""
    networks = {id(network): network for network in named_cells(function).values()}
    proof = FirstBatch(owner, function, list(networks.values()), options)
    if batches < 2:
        proof.skip("nothing is accumulated")
    return proof


class Advice:
    """The advice of one step. It is no part of the step, so that the step does not refer to itself."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._cuts = setup.options.accumulates
        self._inputs = 0  # of the batches that were checked
        self._looked = self.is_silent = False  # silent: the step is a trial of another one, which says it
        options = setup.options
        batches = options.accumulation_steps if options.loss_is_mean else 0
        self.proof = FirstBatch("GradAccumulationCell", setup.network, [setup.network], options)
        if setup.of_batch or setup.compiler_distributes:
            self.proof.skip("the loss is one of the whole batch" if setup.of_batch else "the compiler distributes")
        self._losses = LossAdvice("GradAccumulationCell", setup.network, options.counts, batches, self.proof)

    def check_inputs(self, inputs: int) -> None:
        """Refuse a batch of another number of inputs than the network takes."""
        if inputs != self._inputs:
            check_inputs(self._setup.network, inputs)
            self._inputs = inputs

    def look(self, spans_batches: bool, batch: Batch | None = None) -> None:
        """Warn of what was not warned of before. `batch` : where Python has it."""
        if self.is_silent:
            return
        accumulates = spans_batches or self._cuts
        if not self._looked:
            self._looked = True
            for text in self._texts(accumulates):
                if text is not None:
                    warn_user(text)
        if accumulates:
            self._look_at_losses(batch)

    def _look_at_losses(self, batch: Batch | None) -> None:
        if batch is None:
            self.proof.skip("another graph calls the step, as with data sinking", so_far=True)
        elif not self._losses.is_over:
            options = self._setup.options
            is_known = batch.network_inputs is not None or options.trims
            axes = cut_axes(len(batch.inputs), options.shared, options.axis) if is_known else None
            self._losses.look(batch.inputs, axes, batch.micro_batches, batch.network_inputs)

    def look_at_compile_time(self, spans_batches: bool, inputs: int) -> None:
        """The same, where another graph or data sinking compiles the step, with a check of the number of `inputs` ."""
        self.check_inputs(inputs)
        self.look(spans_batches)

    def _texts(self, accumulates: bool) -> list[str | None]:
        network, options = self._setup.network, self._setup.options
        texts = [
            advice_about_ranks("GradAccumulationCell"),
            advice_about_evaluation_mode("GradAccumulationCell", network),
        ]
        if accumulates:
            texts += [
                advice_about_batch_norm(network, "twice" if self._setup.of_batch else "once"),
                advice_about_two_passes(network),
                advice_about_state(network),
                advice_about_summaries(network),
                advice_about_hooked_weights(network),
            ]
            if self._setup.compiler_distributes or (self._setup.of_batch and not runs_eagerly(bool(options.jit))):
                texts.append(advice_about_forward_hooks(network))
        return texts
