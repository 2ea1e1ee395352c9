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
from gaccum_ms.losses.known_losses import KnownLosses
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
    else what is known of MindSpore's losses, which is looked at with the batches of the first window. `owner` : the
    class in it; `counts` : what is counted; `batches` : those of a window."""

    def __init__(
        self, owner: str, function: Callable[..., Any], counts: Sequence[Any], batches: int, proof: FirstBatch
    ) -> None:
        self._make = functools.partial(KnownLosses, owner, function, counts)
        self._losses: KnownLosses | None = None
        self._window = self._batches = batches
        self._told: set[str] = set()
        self._waiting: list[str] = []  # for what the proof says of the next batch
        self.proof = proof
        self.is_over = False  # whether all batches have been looked at that tell anything

    def look(
        self,
        batch: Sequence[Any] | None,
        axes: Sequence[int] | None = None,
        micro_batches: Callable[[], Sequence[Sequence[Any]]] | None = None,
        given: Sequence[Any] | None = None,
    ) -> None:
        """Warn of what was not warned of before. `batch` : the inputs of the network, None if they are not known;
        `given` : those of the step, with samples along `axes` ."""
        text = None if micro_batches is None else self.proof.look(given or batch or (), axes, micro_batches)
        if text is not None:
            warn_user(text)
        self._waiting += self._of_known_losses(batch)
        if self.proof.told:
            self._waiting = []
        waits = self.proof.waits and (self._batches > 0 or self._window < 2)  # after a window no batch may come
        tells = bool(self._waiting) and not waits
        if tells:
            for advice in self._waiting:
                warn_user(advice)
            self._waiting = []
        self.is_over = self._batches < 1 and (self.proof.is_over or (tells and self.proof.waits))

    def look_in_loop(self, batch: Sequence[Any], count: ms.Tensor | None = None) -> None:
        """The same for a batch of a loop, which is a micro-batch of its window. `count` : the batch's, if the loop
        gives it; what is known of losses is then not looked at."""
        samples = batch[0].shape[0]
        has_samples = [isinstance(value, ms.Tensor) and value.ndim > 0 and len(value) == samples for value in batch]
        axes = [0 if of_samples else UNCUT for of_samples in has_samples]
        if count is None:
            self.look(batch, axes, lambda: [batch])
        elif not self.proof.is_over:
            text = self.proof.look(batch, axes, lambda: [batch], float(count.asnumpy()))
            if text is not None:
                warn_user(text)

    def _of_known_losses(self, batch: Sequence[Any] | None) -> list[str]:
        if self.proof.told or self._batches < 1 or (batch is None and self._losses is not None):
            return []
        self._losses = self._losses or self._make()  # late: see above
        self._batches -= batch is not None
        texts = self._losses.advice(batch, is_proved=self.proof.is_decided)
        new = [text for text in texts if text not in self._told]
        self._told.update(new)
        return new


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
        if self._losses.is_over:
            return
        options = self._setup.options
        if batch is None:
            self.proof.skip("another graph calls the step, as with data sinking", so_far=True)
            self._losses.look(None)
            return
        is_known = batch.network_inputs is not None or options.trims
        axes = cut_axes(len(batch.inputs), options.shared, options.axis) if is_known else None
        self._losses.look(batch.network_inputs, axes, batch.micro_batches, batch.inputs)

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
