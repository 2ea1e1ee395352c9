"""How Python calls the training step: checks before the graph runs, errors after it, and clean-up after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms

from gaccum_ms.backend import graphs
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.checks.arguments import batch_shapes
from gaccum_ms.distributed.ranks import broadcast_parameters
from gaccum_ms.layers.sparse import explain_sparse_gradients
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.splitting.even_split import cut, cut_axes
from gaccum_ms.training.admission import NoCount
from gaccum_ms.training.auto_size import AutoSize
from gaccum_ms.training.auto_tokens import AutoTokens
from gaccum_ms.training.python_split import PythonSplit

if TYPE_CHECKING:
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.options.compatibility import Setup
    from gaccum_ms.training.advice import Advice


class CalledFromPython:
    """Mixin of the step, which has the window, the update and the options."""

    called_by_python = False  # see graphs.py
    _auto: Any
    _begin: Any
    _given: tuple
    _jit: bool
    _setup: Setup
    _split: Any
    advice: Advice
    _ranks_agree: bool
    _unrolled: bool
    _no_count: NoCount
    batch_count: ms.Parameter
    batch_items: ms.Parameter
    spans_batches: bool
    update: Any
    weights: Any
    window: Any
    window_count: ms.Parameter
    window_position: ms.Parameter

    def _choose_graphs(self: Any, cell: GradAccumulationCell) -> None:
        """The parts that Python runs, for a step of several graphs."""
        graphs.check_compilable("GradAccumulationCell", self._jit, "count", cell.counts)
        graphs.check_compilable("GradAccumulationCell", self._jit, "transforms", cell.transforms)
        self._auto = AutoSize(self, cell) if cell.finds_size else None
        self._no_count = NoCount(cell.min_count)
        self._split = PythonSplit(self, cell.options) if cell.splits_in_python else None
        if cell.finds_tokens:
            self._auto = self._split = AutoTokens(self, cell, self._split)

    def __call__(self, *inputs, **named):
        if named:
            raise TypeError(
                f"For '{type(self).__name__}', a batch must be given by position, in the order of the network's "
                f"'construct', but got {', '.join(named)} by name."
            )
        self._begin()
        batch = self._checked(inputs)
        if not self._unrolled:
            self.window.copies.begin_call()
        try:
            outputs = self._run(*batch)
        except BaseException as error:
            close_tape()
            self.window.reset_eagerly()  # else the next batch would be added to what this one left
            if self.update.has_statistics and not int(self.window_position.asnumpy()):
                self.update.statistics.reset_eagerly()
            explain_sparse_gradients(error)
            raise
        if self._setup.o.counts_items:
            self._check_count(batch)
        return outputs

    def own_inputs(self, inputs):
        """Compiled: the inputs as a loop can read them."""
        return graphs.with_own_storage(inputs)

    def to_float(self: Any, dst_type: ms.Type) -> Any:
        """Cast the network as `nn.Cell.to_float` does. Loss, accumulators and optimizer keep their dtypes."""
        self.network.to_float(dst_type)
        return self

    def _run(self, *inputs: ms.Tensor) -> Any:
        if self._unrolled:
            with auto_parallel.settings_of(self._given[0]):
                auto_parallel.check_device()
                return graphs.run(self, False, *inputs)
        with self._on_ranks_that_agree():
            return self._train(*inputs)

    @contextlib.contextmanager
    def _on_ranks_that_agree(self) -> Iterator[None]:
        """Broadcast the weights once, if ``parameter_broadcast`` is set: ranks need not compile at the same time."""
        if not self._ranks_agree:
            broadcast_parameters(self)
        self._ranks_agree = True
        with graphs.compiling_alone():
            yield

    def _train(self, *inputs: ms.Tensor) -> Any:
        if self._split is not None:
            return self._split(*inputs)
        if self._auto is not None:
            return self._auto(inputs)
        return graphs.run(self, self._jit, *inputs)

    def _checked(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        """The batch to train on, or one clear error before anything runs. It is a tuple of inputs; with a function as
        `split` , these and the list of micro-batches."""
        if self._split is not None:
            parts = self._split.parts(inputs)
            self.advice.look(self.spans_batches, [part[0].shape[0] if part[0].ndim else 1 for part in parts])
            return inputs, parts
        self.advice.look(self.spans_batches, self._check_batch(inputs), inputs)
        return inputs

    def _check_batch(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        """The sizes of the batch's micro-batches, if it is cut here. A first batch smaller than `micro_size` is an
        error; a later one is a short last batch."""
        shapes = batch_shapes(inputs)
        if self._unrolled:
            auto_parallel.check_batch(shapes, self._setup.o.micro_size)
            return ()
        micro_size = self._setup.o.micro_size
        plan = self.window.plan_in_python(shapes)
        self.window.check_plan(plan)  # first, because all ranks must
        too_short = micro_size is not None and micro_size > plan.samples
        if too_short and not int(self.batch_count.asnumpy()):
            raise ValueError(
                f"For 'GradAccumulationCell', the argument 'micro_size' is the number of micro-batches and must not "
                f"be larger than the batch, but got micro_size={micro_size} and a batch of {plan.samples} "
                f"sample(s). Use a larger batch or a smaller 'micro_size'; samples per micro-batch are set by "
                f"'micro_batch_size'."
            )
        self.window.find_output_axes(inputs, plan, self.weights)
        return plan.size, plan.rest

    def _check_count(self, batch: Sequence[Any]) -> None:
        """Raise an error for a bad count; the graph did not update with it on any rank."""
        ended = not self.spans_batches or not int(self.window_position.asnumpy())
        of_window = ended and (not self.spans_batches or self._split is not None)
        total = (self.window_count if of_window else self.batch_items).asnumpy()
        if (total == total).all():
            if ended:
                dropped = getattr(self, "dropped_micro_batches", None)  # several losses drop none
                self._no_count.warn("GradAccumulationCell", self.window_count, dropped)
            return
        if self._setup.o.returns_ratio:
            raise ValueError(
                "For 'GradAccumulationCell', with reduction='ratio' the network must return a denominator that is a "
                "finite number of items and not negative, but got one that is negative, infinite or NaN for a "
                "micro-batch of this rank or, where this rank's are fine, of another. "
                + _consequence(self.spans_batches, True)
                + ": correct the network and go on."
            )
        parts = batch[1] if self._split is not None else self.micro_batches_of(batch)
        counted = [[float(count(*part)) for part in parts] for count in self._setup.o.counts if count is not None]
        others = "" if self.spans_batches else "Where these are fine, another rank's are not. "
        was_added = self.spans_batches and self.window.weighing.runs_all
        if self._split is not None:
            others, was_added = "Where these are fine, another rank's or batch's of the window are not. ", True
        raise ValueError(
            f"For 'GradAccumulationCell', 'count' must return a finite number of items that is not negative, but got "
            f"{counted} for the micro-batches of this rank. {others}"
            f"{_consequence(self.spans_batches, was_added)}: correct 'count' and go on."
        )

    def micro_batches_of(self, inputs: Sequence[ms.Tensor]) -> list[list[ms.Tensor]]:
        """The micro-batches of a batch, as the graph cuts it."""
        plan = self.window.plan_in_python(batch_shapes(tuple(inputs)))
        return cut(inputs, plan, cut_axes(len(inputs), self._setup.o.shared, self._setup.o.axis))


def _consequence(spans_batches: bool, was_added: bool) -> str:
    """The consequence of a bad count. `was_added` : part of its batch was already in the accumulators."""
    if not spans_batches:
        return "Nothing was changed"
    return "The window that the batch is in does not update" if was_added else "The batch is left out of its window"
