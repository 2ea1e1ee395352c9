"""The training step: the order of one update.

    split the batch
    for each micro-batch:                       (window.py)
        forward, backward                       (measure.py) seeded with its share or count, times the loss scale
        note its norm                           with record_noise (noise.py)
        add to the accumulators                 (ledger.py) unless it counts nothing, or overflowed and is dropped
    if the batch is its window's last:          (open_window.py; without accumulation_steps each batch is)
        reduce over ranks, once                 several counted losses: their counts too, before the loop
        divide by total count and loss scale    (from here on: update.py)
        clip by global norm
        if finite, and something was counted:   the same on all ranks
            apply the other transforms          (transforms/chain.py) they change the gradient, or veto the update
            update, or skip
        adjust the loss scale
        reset the accumulators

Where a full window of several batches may make no update, its end is a separate graph (one_graph.py). Within another
graph, such as that of data sinking, it is a branch.
With ``micro_batch_size="auto"`` the loop is a separate graph (two_graphs.py), which runs again if memory runs out
(found_size.py).
With a function as `split` , Python loops over micro-steps, which are separate graphs (python_split.py).
A loss of the whole batch has two loops, the first forward only (grad_cache.py). In semi-auto and auto parallel mode
there is no loop: MindSpore's compiler accumulates and reduces (unrolled_window.py). From the division on, all modes are
the same.

Graph mode parses everything that `construct` calls, here and in the files named above, into one graph with the loop
in it. The loop's body is compiled once, so compile time and memory do not grow with the number of micro-batches. Rules:

* Values are carried as ``a = a + b`` : ``a += b`` would write into a constant Tensor of the compiled graph.
* `ops.depend` orders side effects.
* Python values decide, at compile time, what depends on shapes and options.
* An ``if`` on a Tensor decides what depends on data. The skipped branch costs nothing. But some forms make MindSpore's
  runtime (2.7.2 to 2.10) lose memory at each call, for ever; tests/training/test_memory_growth.py watches all kinds:

      an ``if`` on a Tensor within a loop, also in a function that the loop calls: write an inner ``while`` that runs
      once or not at all, in the same function as the loop, and not within an ``if`` on a constant
      a branch that runs at exactly every second or fourth call (not: every third, or at random), as that of a window's
      end, and passes values that it computed to a branch or loop within it: make one branch of both, or give the outer
      one a graph that Python calls (`WindowEnd` )
      an input of a graph with a branch that only `ops.depend` uses: let a kernel use it

* No global that a method uses has the name of a method of its class: graph mode would use the method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.assembly import fused_reducer, window_of
from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import Update, WindowEnd
from gaccum_ms.backend import graphs
from gaccum_ms.backend.parameters import counter, expose_records, hold_weights, with_places_of_mindspore
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.cell import cell_with_loss
from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.checks.other_names import explains_other_names
from gaccum_ms.distributed.ranks import broadcast_parameters
from gaccum_ms.distributed.stages import stages
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import CELL, IN_ONE_GRAPH, PIPELINE
from gaccum_ms.record.run_record import RunRecord, rule_of
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.pipeline import explained_errors
from gaccum_ms.semi_auto.unrolled_window import AddedBatch, UnrolledWindow
from gaccum_ms.training.admission import admit
from gaccum_ms.training.advice import Advice
from gaccum_ms.training.bad_counts import Counts
from gaccum_ms.training.components import Components
from gaccum_ms.training.found_size import FoundSize
from gaccum_ms.training.lifecycle import Lifecycle
from gaccum_ms.training.one_graph import CompilerGraph, OneGraph, even_micro_batches
from gaccum_ms.training.python_split import PythonSplit
from gaccum_ms.training.runner import Runner
from gaccum_ms.training.two_graphs import TwoGraphs

if TYPE_CHECKING:
    from gaccum_ms.accumulation.open_window import OpenWindow
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.options.options import Options
    from gaccum_ms.splitting.splitter import Splitter

_NAME = "TrainOneStepWithGradAccumulationCell"


class TrainOneStepWithGradAccumulationCell(nn.TrainOneStepCell):
    r"""
    The training step of a :class:`GradAccumulationCell`. Each call trains on one batch; every `accumulation_steps`
    batches there is one update.

    Parameters, optimizer state and loss equal, to float32 rounding, those of `nn.TrainOneStepCell
    <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepCell.html>`_ on the whole batch; the
    README lists the exceptions. In data parallel mode, gradients are reduced once per update, in few large buffers, and
    averaged or summed according to ``gradients_mean`` ; with `count` , which is exact over ranks, they are always
    summed. A batch that does not end its window changes neither weights nor optimizer, and reduces nothing.

    In semi-auto and auto parallel mode MindSpore's compiler distributes the graph and accumulates. What needs a loop,
    such as a ragged batch, is refused before compiling.

    On a CPU with AVX-512, a network with convolutions sets ``ONEDNN_MAX_CPU_ISA=AVX2`` , unless the environment sets
    it: see :func:`tune_cpu` .

    Args:
        network (GradAccumulationCell): The network with its loss and the options of accumulation; or `AutoParallel
            <https://www.mindspore.cn/docs/en/master/api_python/parallel/
            mindspore.parallel.auto_parallel.AutoParallel.html>`_ around it.
        optimizer (Optimizer): The optimizer of the network's parameters: any `nn.Optimizer` , or one of
            `mindspore.experimental.optim` or `mindspore.mint.optim` that has kernels on the device.
        scale_sense (Union[Cell, Tensor], optional): Loss scale, as `nn.TrainOneStepWithLossScaleCell
            <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepWithLossScaleCell.html>`_
            takes it: a Cell that adjusts it, such as `nn.DynamicLossScaleUpdateCell` , or a Tensor of shape
            :math:`()` or :math:`(1,)`. The scale multiplies each micro-batch's backward and is divided out once.
            A window whose gradient is not finite does not update, on any rank. Default: ``None`` , no scaling and no
            check.

    Keyword Args:
        loss_fn (Cell, optional): The loss, if the network returns none: it maps what the network returns for the first
            input, and the second input, to the loss. Default: ``None`` , the network returns its loss.

    Inputs:
        - **\*inputs** (Tensor) - The batch. Each input has shape :math:`(N, ...)` with the same :math:`N`; all are
          split along axis 0 at the same boundaries, unless `split` is given. `set_inputs` may leave :math:`N` and
          other axes open (``Tensor(shape=[None, ...])`` ): one graph then runs batches of all lengths.

    Outputs:
        Tensor of shape :math:`()`, float32: the loss of the whole batch; with `accumulation_steps` , on this rank, or
        in semi-auto and auto parallel mode on all devices. With `scale_sense` , a tuple as of MindSpore's step: that
        loss; whether the window overflowed and did not update, a bool Tensor of shape :math:`()`; and the scale of
        this call, float32 of shape :math:`()`. With the cell's `aux` , a tuple of these and the network's other
        outputs.

        More values are in Parameters of the step, for callbacks. Int32, of shape :math:`()`: ``update_count`` and
        ``batch_count`` , updates made and batches seen so far; ``window_position`` , batches in the open window. Of the
        last window, float32: ``grad_norm`` (with `max_grad_norm` or `record_noise` ), the global norm before clipping;
        ``window_count`` (with `count` , ``overflow="drop_micro_batch"`` or `accumulation_steps` ), the total count of
        all ranks; ``dropped_micro_batches`` (likewise, but not in semi-auto and auto parallel mode), the number left
        out on all ranks; ``loss_terms`` (with several losses), the mean of each; ``window_loss`` (with
        `accumulation_steps` ), the mean loss; ``noise_sums`` (with `record_noise` ), the input of
        :class:`GradNoiseScale` . :class:`SkipSpikes` adds its own.

    Raises:
        TypeError: If an argument or input has another type than above; if a function as `split` returns no list of
            tuples of Tensors.
        ValueError: If the optimizer has no parameter of the network; if an input has no axis 0 or its length differs
            from the others'; if the first batch has fewer samples than `micro_size`; if the loss is not a scalar; if
            a count is negative or not finite; if an embedding makes sparse gradients; if the step is compiled, and
            the optimizer or a transform changes values that are no Parameters, such as the entries of a list; in
            semi-auto and auto parallel mode, for options and batches that the compiler cannot accumulate with.
        RuntimeError: In hybrid parallel mode; in semi-auto and auto parallel mode, in PyNative mode or on CPU; if the
            parallel mode has changed between the step's building and its run; with ``micro_batch_size="auto"`` , if not
            even one sample fits into memory, or as part of another graph; with an optimizer that writes no weights
            there: `mint.optim.SGD` in PyNative mode on CPU.

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

    called_by_python = False  # see graphs.py
    around_flush = contextlib.nullcontext  # while ms.Model trains, WindowRecorder's

    @explains_other_names
    def __init__(
        self,
        network: GradAccumulationCell,
        optimizer: nn.Optimizer,
        scale_sense: nn.Cell | ms.Tensor | None = None,
        *,
        loss_fn: nn.Cell | None = None,
    ) -> None:
        with auto_parallel.settings_of(network):
            inner = auto_parallel.held_cell(network)
            cell = cell_with_loss(_NAME, inner, loss_fn, "network", ", or AutoParallel around one")
            self._build(cell, optimizer, scale_sense)
            self._outer = (network,)  # in a tuple, because it is no child
            # Weak: in a circle the step would live on until Python collects garbage, and MindSpore compiles the graphs
            # of all other Cells anew when a Cell goes.
            run_graph = weakref.WeakMethod(self._run_graph)
            self._choose_runner = lambda components: runner_of(components, cell, network, run_graph)
            self._assemble()
        cell.has_step = inner.has_step = True

    def _build(
        self, network: GradAccumulationCell, optimizer: nn.Optimizer, scale_sense: nn.Cell | ms.Tensor | None
    ) -> None:
        setup = admit(_NAME, network, optimizer)
        super().__init__(setup.network, optimizer)
        self._named_weights = dict(self._params)
        hold_weights(self, self.weights)
        self._setup = setup
        self.advice = Advice(setup)
        self._look = ops.constexpr(self.advice.look_at_compile_time)
        options, _, self._unrolled = setup
        if self.reducer_flag:
            self.grad_reducer = fused_reducer(options, self)
        # A string, because graph mode must be able to raise it.
        self._not_one_graph = str(compatibility.refused(IN_ONE_GRAPH, "GradAccumulationCell", setup) or "")
        self._jit, self._ranks_agree = bool(options.jit), not self.reducer_flag
        self._axis = options.first_axis
        graphs.check_compilable("GradAccumulationCell", self._jit, "count", options.counts)
        graphs.check_compilable("GradAccumulationCell", self._jit, "transforms", options.transforms)
        self.window_position = counter("window_position")
        self.batch_count = counter("batch_count")
        self.rate_steps = counter("rate_steps", options.accumulation_steps)  # the rate is for windows of this length
        self.spans_batches = options.accumulation_steps > 1 or options.splits_in_python
        self.window = self._make_window()
        self.update = Update(_NAME, optimizer, self.weights, self.window.ledger, options, scale_sense, setup.network)
        # The last child, so that its Parameters are the last in a checkpoint: a file that was cut lacks one of them.
        steps, resumes_windows = options.accumulation_steps, not self._unrolled
        self.run_record = RunRecord(_NAME, (rule_of(options),), steps, options.reduction, resumes_windows)
        self.run_record.loss_check = self.advice.proof

    def _make_window(self) -> Any:  # a Window, or an UnrolledWindow
        if self._unrolled:
            self._setup = auto_parallel.with_accumulators(self._setup) if self.spans_batches else self._setup
            return UnrolledWindow(self._setup, self.weights, self.window_position if self.spans_batches else None)
        position = self.window_position if self.spans_batches else None
        return window_of(self._setup, self.weights, self.grad_reducer, position)

    def _assemble(self) -> None:
        """Connect the components, of which the window may be new."""
        open_window = self._open_window()
        end_window: Any = None
        if open_window is not None and self._unrolled:
            end_window = AddedBatch(self.window, self.update, self.batch_count)
        elif open_window is not None:
            end_window = self.end_window = WindowEnd(self.window.ledger, self.update, self._jit)
        self.accu_grads = self.window.store.sums
        expose_records(self, self.window, open_window, self.update, *self.update.links)
        counters = self.batch_count, self.window_position
        own = self.options, self.network, self.weights, self.window, self.update, end_window
        components = Components(*own, *counters, self.advice.check_inputs)
        self._counts = Counts(components) if components.options.counts_items else None
        loss_scale = {} if self.update.manager is None else {"loss_scaling_manager": self.update.manager}
        children = {"network": self.network, "optimizer": self.optimizer, **loss_scale}
        named = with_places_of_mindspore(self._named_weights, children)
        lasting = self.run_record, self.update, open_window, self.window_position
        self._lifecycle = Lifecycle(*lasting, self._jit, named)
        self._runner: Runner = self._choose_runner(components)
        if self._unrolled:
            self.set_train()  # the compiler's passes need it
        else:
            self._lifecycle.refuse_lost_state()
            self._lifecycle.keep_in_place(self)

    def _open_window(self) -> OpenWindow | None:
        return self.window.open if self.spans_batches else None

    def let_windows_span_batches(self, accumulation_steps: int = 2) -> None:
        """Prepare the step for :meth:`set_accumulation_steps` , if the cell has no `accumulation_steps` . This is
        refused for several losses, for a loss of the whole batch, and after the step has run with windows of one batch.
        `accumulation_steps` : those that will be set, for errors, if they are known.
        """
        if self.spans_batches:
            return
        options = dataclasses.replace(self.options, accumulation_steps=accumulation_steps)
        for place in (CELL, PIPELINE) if stages() > 1 else (CELL,):
            compatibility.check(place, _NAME, self._setup._replace(options=options))
        if self.run_record.begun:
            raise RuntimeError(
                "For 'TrainOneStepWithGradAccumulationCell', windows of several batches must be asked for before the "
                "first step, but got a step that has run, of a cell with accumulation_steps=1. Give the cell "
                "accumulation_steps > 1."
            )
        self.spans_batches = True
        with auto_parallel.settings_of(self._outer[0]):
            self.window = self._make_window()
            self.update.window = self.window.ledger
            self._assemble()

    @property
    def options(self) -> Options:
        """The options of the cell."""
        return self._setup.options

    @property
    def split(self) -> Splitter | None:
        """What splits this step's batches in Python: with :class:`MaxTokens` the step's own copy, whose ``plan`` ,
        ``widths`` and ``max_tokens`` are those of this training. ``None`` if no `split` of the cell does."""
        return self._runner.split

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in a micro-batch, if the cell's `micro_batch_size` was given. With ``"auto"`` , the size that was
        found, or halved since; ``None`` before the first batch."""
        return self.window.micro_batch_size

    @property
    def loss_scaling_manager(self) -> nn.Cell | None:
        """The Cell that adjusts the loss scale, as in `nn.TrainOneStepWithLossScaleCell`."""
        return self.update.manager

    def set_sense_scale(self, sens: ms.Tensor) -> None:
        """Set the loss scale, a Tensor of the shape of the old one, as the method of this name of
        `nn.TrainOneStepWithLossScaleCell` does.

        Raises:
            TypeError: If there is no loss scale, or `sens` is no such Tensor.
            ValueError: If it is not positive and finite.
        """
        self.update.set_scale(sens)

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of batches that share an update, at least 1, in later windows; an open one keeps its own.
        Nothing is compiled anew.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is less than 1.
            RuntimeError: If it is more than 1, and the step has run with windows of one batch.
        """
        check_positive_int(_NAME, "accumulation_steps", accumulation_steps)
        if accumulation_steps > 1:
            self.let_windows_span_batches(accumulation_steps)
        if self.spans_batches:
            self._lifecycle.begin_call()
            self.window.open.set_steps(accumulation_steps)

    def flush(self) -> bool:
        """Update with the batches of the open window, divided by their count; without batches, train nothing.

        All ranks must call this equally often; some may have no batches. If none has any, the last window's records
        become 0. An interrupted flush keeps the window, or drops it if the optimizer may have written.

        Returns:
            bool, whether an update was made.
        """
        self._lifecycle.begin_batch()
        if not self.spans_batches:
            return False
        with self.around_flush(), self._on_ranks_that_agree():
            self._runner.agree()
            return self._runner.flush()

    def to_float(self, dst_type: ms.Type) -> Any:
        """Cast the network as `nn.Cell.to_float` does. Loss, accumulators and optimizer keep their dtypes."""
        self.network.to_float(dst_type)
        return self

    @property
    def has_averages(self) -> bool:
        """Whether `transforms` has a :class:`WeightAverage` ."""
        return self._lifecycle.average is not None

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the weights have the values of their averages: for evaluation, export, or a
        checkpoint of the network. At its end, also after an error, the weights are restored. `Model.fit` evaluates
        within it automatically.

        Raises:
            ValueError: If `transforms` has no :class:`WeightAverage` .
            RuntimeError: If something is trained in it.
        """
        return self._lifecycle.averaged_weights()

    def check_names_and_refresh_name(self):
        """MindSpore calls this before a Cell's first call."""
        self._lifecycle.refresh_names()

    def init_parameters_data(self, *args, **kwargs):
        """MindSpore calls this before it saves a checkpoint, unless its compiler has laid the step out."""
        if not self._unrolled:
            self._lifecycle.prepare_save()
        return super().init_parameters_data(*args, **kwargs)

    def keep_records(self) -> None:
        """Let a checkpoint have all records, also one of a Cell around the step, as with data sinking."""
        self.run_record.keep_state()
        if self._unrolled:
            auto_parallel.save_records(self)

    @nn.Cell.parameter_layout_dict.getter
    def parameter_layout_dict(self):
        """MindSpore reads this first when it saves a checkpoint."""
        if self._unrolled and auto_parallel.is_saving():
            auto_parallel.refuse_open_window(self)
            self.keep_records()
        return nn.Cell.parameter_layout_dict.fget(self)

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Load a checkpoint's values, by name, also in the middle of training; `gaccum_ms.resume` checks them."""
        self._lifecycle.load(self, values)

    def __call__(self, *inputs, **named):
        if named:
            raise TypeError(
                f"For '{_NAME}', a batch must be given by position, in the order of the network's 'construct', but got "
                f"{', '.join(named)} by name."
            )
        self._lifecycle.begin_batch()
        self.run_record.training_ended = False
        batch = self._runner.prepare(inputs)
        self.advice.look(self.spans_batches, batch)
        try:
            with self._on_ranks_that_agree():
                outputs = self._runner.run(batch)
        except BaseException:
            close_tape()
            self.window.reset_eagerly()  # else the next batch would be added to what this one left
            if self.update.has_statistics and not int(self.window_position.asnumpy()):
                self.update.statistics.reset_eagerly()
            raise
        if self._counts is not None:
            self._counts.check(batch)
        shape = getattr(batch.inputs[0], "shape", ())
        self.run_record.note_batch(shape[self._axis] if self._axis < len(shape) else 1)
        return outputs

    def micro_batches_of(self, batch: Sequence[ms.Tensor]) -> Sequence[Sequence[ms.Tensor]]:
        """The micro-batches of a batch, as the graph cuts it. No collective."""
        return even_micro_batches(self.window, self.options, batch)

    @contextlib.contextmanager
    def _on_ranks_that_agree(self) -> Iterator[None]:
        """Broadcast the weights once, if ``parameter_broadcast`` is set: ranks need not compile at the same time."""
        if not self._ranks_agree:
            broadcast_parameters(self)
        self._ranks_agree = True
        with contextlib.nullcontext() if self._unrolled else graphs.compiling_alone():
            yield

    def _run_graph(self, *inputs: ms.Tensor) -> Any:
        with explained_errors() if self._unrolled else contextlib.nullcontext():
            return graphs.run(self, self._jit, *inputs)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def construct(self, *inputs):
        if self._not_one_graph:
            raise RuntimeError(self._not_one_graph)
        auto_parallel.check_built_for(self._unrolled)
        self._look(self.spans_batches, len(inputs))
        scale = self.update.scale()
        # In a graph that the compiler distributes, its passes look for slices of the inputs themselves.
        has_own_storage = self.called_by_python or self._unrolled
        inputs = clear_flag(inputs if has_own_storage else graphs.with_own_storage(inputs))
        if self.spans_batches:
            loss, overflow, outputs = self._in_window(inputs, scale)
        else:
            window, outputs = self.window.run(inputs, scale)
            loss, overflow = self.update(*window)
        loss = ops.depend(loss, ops.assign_add(self.batch_count, ms.Tensor(1, ms.int32)))
        return self.update.returned(loss, overflow, scale, outputs)

    def _in_window(self, inputs, scale):
        """One batch of a window of several: its loss, whether the window overflowed, and its outputs."""
        if self._unrolled:  # the graph of a window's last batch
            auto_parallel.check_windows_of_batches(self.called_by_python)
            window, loss, outputs = self.window.end_batches(inputs)
            mean, overflow = self.update(*window)
            return ops.depend(loss, ops.assign(self.window.open.window_loss, mean)), overflow, outputs
        loss, outputs = self.window.add_batch(inputs, scale)
        overflow = ms.Tensor(False, ms.bool_)
        if self.called_by_python and self.end_window.branches:  # Python ends the window: one_graph.py
            return loss, overflow, outputs
        if self.window.open.is_complete(loss):
            overflow = self.end_window.of_full(loss)
            loss = ops.depend(loss, overflow)
        return loss, overflow, outputs


# -- not compiled ------------------------------------------------------------------------------------------------------


def runner_of(components: Components, cell: GradAccumulationCell, network: nn.Cell, run_graph: Any) -> Runner:
    """How Python calls the step. `network` : the cell, or an AutoParallel around it."""
    if isinstance(components.window, UnrolledWindow):
        return CompilerGraph(network, components, run_graph)
    if cell.finds_size:
        return FoundSize(components, cell, TwoGraphs(components), step_on_trial)
    if not cell.splits_in_python:
        return OneGraph(components, run_graph)
    split = PythonSplit(components)
    return FoundSize(components, cell, split, step_on_trial) if cell.auto else split


def step_on_trial(cell: GradAccumulationCell, optimizer: Any, size: int) -> TrainOneStepWithGradAccumulationCell:
    """A step for a trial: each batch ends in an update, and the step of the real training gives the advice. `size` : if
    the cell is one that finds it."""
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    step.advice.is_silent = True
    if isinstance(step._runner, FoundSize):
        step._runner = step._runner.runner
        step._runner.cut_into(size)
    if step.spans_batches:
        step.set_accumulation_steps(1)
    return step
