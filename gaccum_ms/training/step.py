"""The training step: the order of one update.

    split the batch
    for each micro-batch:                       (window.py)
        forward, backward                       (micro_step.py) seeded with its share or count, times the loss scale
        note the first one's norm               with record_noise (noise.py)
        add to the accumulators                 unless it counts nothing, or overflowed and is to be dropped
    the window's last batch?                    (open_window.py; without accumulation_steps each is)
        reduce across ranks, once               several counted losses: their counts too, before the loop
        divide by total count and loss scale    (from here on: update.py)
        clip by global norm
        finite, and something counted?          all ranks agree
            update, or skip
        adjust the loss scale
        reset the accumulators

With ``micro_batch_size="auto"`` the loop is a graph of its own, and runs again where memory ran out (auto_size.py).
A loss of the whole batch has two loops, the first forward only (grad_cache.py). With `shard_accumulators` each
micro-batch is reduced (sharded_accumulators.py). In semi-auto and auto parallel mode there is no loop: MindSpore's
compiler accumulates and reduces (unrolled_window.py). From the division on all is the same.

Everything from `construct` down, here and in the files named above, is parsed by graph mode into one graph with the
loop in it. The loop's body is compiled once, so compile time and memory do not grow with the number of micro-batches.
Five rules keep it right: values are carried as ``a = a + b``, because ``a += b`` on a constant Tensor writes into the
constant, which lives on in the compiled graph; side effects are ordered by `ops.depend`; what depends on shapes and
options is decided while compiling, by Python values; what depends on data is an ``if`` on a Tensor, and what it skips
costs nothing; and no global that a method uses has the name of a method of its class, which graph mode would take it
for.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import compatibility
from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.noise import ALL_SUMS
from gaccum_ms.accumulation.open_window import OpenWindow
from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import Update, WindowEnd
from gaccum_ms.accumulation.window import Window
from gaccum_ms.accumulation.windows import Kinds, combined, kinds_of
from gaccum_ms.backend import graphs
from gaccum_ms.backend.checks import check_optimizer, check_positive_int
from gaccum_ms.backend.convolutions import limit_instructions_for
from gaccum_ms.backend.parameters import counter, hold_weights, record, show_records
from gaccum_ms.backend.pynative_tape import forget_interrupted_gradient
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.compatibility import IN_ONE_GRAPH, SPAN_LATER, Setup
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.distributed.ranks import broadcast_parameters, check_parallel_mode
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm, warn_about_batch_norm
from gaccum_ms.layers.sparse import explain_sparse_gradients, refuse_sparse_gradients
from gaccum_ms.layers.window_batchnorm import window_statistics
from gaccum_ms.losses.batch_loss import passes, warn_about_two_passes
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.unrolled_window import UnrolledWindow
from gaccum_ms.training.auto_size import AutoSize
from gaccum_ms.training.provenance import SHARDED, Provenance, Resumable

_NAME = "TrainOneStepWithGradAccumulationCell"


class TrainOneStepWithGradAccumulationCell(Resumable, nn.TrainOneStepCell):
    r"""
    The training step of a :class:`GradAccumulationCell`: one call, one batch, and one update for `accumulation_steps`
    of them.

    Parameters, optimizer state and loss end where `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/
    api_python/nn/mindspore.nn.TrainOneStepCell.html>`_ would leave them on the whole batch, to float32 rounding; see
    the README for where that cannot hold. In data parallel mode gradients are reduced once per update, in few large
    buffers, as ``gradients_mean`` says; with `count` , which is exact over ranks, they are always summed. A batch that
    does not end its window changes neither weights nor optimizer, and reduces nothing.

    In semi-auto and auto parallel mode MindSpore's compiler distributes the graph and accumulates; what needs a loop
    (ragged batches, windows of several batches) is refused before compiling.

    On a CPU with AVX-512, for a network that convolves, ``ONEDNN_MAX_CPU_ISA=AVX2`` is set, unless the environment has
    it: see :func:`tune_cpu` .

    Args:
        network (GradAccumulationCell): The network with its loss and the options of accumulation; or `AutoParallel
            <https://www.mindspore.cn/docs/en/master/api_python/parallel/
            mindspore.parallel.auto_parallel.AutoParallel.html>`_ around it.
        optimizer (Optimizer): Any `nn.Optimizer` over the network's parameters.
        scale_sense (Union[Cell, Tensor], optional): Loss scale, as `nn.TrainOneStepWithLossScaleCell
            <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepWithLossScaleCell.html>`_
            takes it: a Cell that adjusts it, such as `nn.DynamicLossScaleUpdateCell` , or a Tensor of shape
            :math:`()` or :math:`(1,)`. The scale multiplies each micro-batch's backward and is divided out once.
            A window whose gradient is not finite does not update, on any rank. Default: ``None`` , no scaling and no
            check.

    Inputs:
        - **\*inputs** (Tensor) - The batch. Each input has shape :math:`(N, ...)` with the same :math:`N`; all are
          split along axis 0 at the same boundaries. `set_inputs` may leave :math:`N` and other axes open
          (``Tensor(shape=[None, ...])`` ): one graph then serves batches of all lengths.

    Outputs:
        Tensor of shape :math:`()`, float32: the loss of the whole batch; with `accumulation_steps` , on this rank. With
        `scale_sense` , as MindSpore's step, a tuple of that loss; whether the window overflowed and did not update, a
        bool Tensor of shape :math:`()`; and the scale that it ran with, float32 of shape :math:`()`.

        Callbacks find the rest in Parameters of the step. Int32, of shape :math:`()`: ``update_count`` and
        ``batch_count`` , updates made and batches seen so far; ``window_position`` , batches in the open window. Of the
        last window, float32: ``grad_norm`` (with `max_grad_norm` or `record_noise` ), the global norm before clipping;
        ``window_count`` (with `count` , ``overflow="drop_micro_batch"`` or `accumulation_steps` ), the total count of
        all ranks; ``dropped_micro_batches`` (likewise), how many were left out on all ranks; ``loss_terms`` (with
        several losses), the mean of each; ``window_loss`` (with `accumulation_steps` ), the mean loss; ``noise_sums``
        (with `record_noise` ), of which :class:`GradNoiseScale` makes its estimates.

    Raises:
        TypeError: If `network` is not a GradAccumulationCell, `optimizer` not an Optimizer, `scale_sense` neither
            Cell nor Tensor, or an input not a Tensor.
        ValueError: If the optimizer has no parameter of the network; if an input has no axis 0 or its length differs
            from the others'; if the first batch has fewer samples than `micro_size`; if the loss is not a scalar; if
            a count is negative or not finite; if an embedding makes sparse gradients; in semi-auto and auto parallel
            mode, for options and batches that the compiler cannot accumulate with.
        RuntimeError: In hybrid parallel mode, or with pipeline stages; in semi-auto and auto parallel mode, in PyNative
            mode or on CPU; if the parallel mode is another one when the step runs than when it was built; with
            ``micro_batch_size="auto"`` , if not even one sample fits into memory, or as part of another graph.

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

    grad_reducer: nn.Cell

    def __init__(
        self, network: GradAccumulationCell, optimizer: nn.Optimizer, scale_sense: nn.Cell | ms.Tensor | None = None
    ) -> None:
        with auto_parallel.settings_of(network):
            cell = auto_parallel.held_cell(network)
            self._build(cell, optimizer, scale_sense)
        cell.keep_options()
        if cell.accumulates:
            warn_about_batch_norm(cell, passes(cell))
            warn_about_two_passes(cell)
        self._given = (network,)  # an AutoParallel's settings are for each call; in a tuple, as no part of the step

    def _build(self, network: nn.Cell, optimizer: nn.Optimizer, scale_sense: nn.Cell | ms.Tensor | None) -> None:
        if not isinstance(network, GradAccumulationCell):
            raise TypeError(
                f"For 'TrainOneStepWithGradAccumulationCell', the argument 'network' must be a "
                f"gaccum_ms.GradAccumulationCell, or AutoParallel around one, but got '{type(network).__name__}'."
            )
        check_optimizer(_NAME, network, optimizer)
        check_parallel_mode("GradAccumulationCell", compiler_distributes=True)
        unrolled = auto_parallel.compiler_distributes()
        if unrolled:
            auto_parallel.check_options(network)
        refuse_sparse_gradients(network)
        if network.finds_size:
            refuse_sync_batch_norm("GradAccumulationCell", network)
        limit_instructions_for(network.network)
        super().__init__(network.network, optimizer)
        hold_weights(self, self.weights)
        self._unrolled = unrolled
        if self.reducer_flag:
            # In place of MindSpore's, and in its group: AdaSum's optimizers have groups of eight ranks.
            group = self.grad_reducer.allgather.group
            noise = [ms.Parameter(ops.zeros((ALL_SUMS,), ms.float32), requires_grad=False)] * network.record_noise
            self.grad_reducer = FusedReducer([*self.weights, *noise], self.mean, self.degree, group)
        self._setup = Setup(network.options, network.network, unrolled)
        # A text, because graph mode must be able to raise it.
        self._not_one_graph = str(compatibility.refused(IN_ONE_GRAPH, "GradAccumulationCell", self._setup) or "")
        self._micro_size = network.micro_size
        self._auto = AutoSize(self, network) if network.finds_size else None
        self._counts = tuple(count for count in network.counts if count is not None)
        self._jit = bool(network.jit)
        self._ranks_agree = not self.reducer_flag
        self.window_position = counter("window_position")
        self.batch_count = counter("batch_count")
        self.rate_steps = counter("rate_steps", network.accumulation_steps)  # what the learning rate is for
        if network.record_noise:  # what AdaScale has made of the rate, and how far that has brought the training
            self.rate_factor = record("rate_factor", value=1.0)
            self.rate_progress = record("rate_progress")
        rule = "counts" if self._counts else "samples" if network.reduction == "mean" else "sums"
        self.spans_batches = network.accumulation_steps > 1
        self.window = self._make_window(self.spans_batches)
        if network.shard_accumulators and self.reducer_flag:
            rule += SHARDED
        self.provenance = Provenance(_NAME, (rule,), network.accumulation_steps, self.reducer_flag)
        drops = network.overflow == "drop_micro_batch"
        self.update = Update(
            _NAME,
            optimizer,
            self.weights,
            self._open_window() or self.window,
            network.max_grad_norm,
            drops,
            scale_sense,
            statistics=window_statistics(network.network),
            keeps_norm=network.record_noise,
        )
        if self.spans_batches:
            self.end_window = WindowEnd(self.window.open, self.update, self._jit)
        self._show_records()
        if unrolled:
            self.set_train()  # the compiler's passes ask for it
        else:
            self._keep_in_place()

    def _make_window(self, spans_batches: bool) -> Window | UnrolledWindow:
        options, network, _ = self._setup
        if self._unrolled:
            return UnrolledWindow(options, network, self.weights)
        kinds = self._kinds_of_window(spans_batches)
        return combined(kinds, options, network, self.weights, self.grad_reducer, self.window_position)

    def _kinds_of_window(self, spans_batches: bool) -> Kinds:
        options, network, _ = self._setup
        return kinds_of(options, network, spans_batches)

    def _show_records(self) -> None:
        self.accu_grads = self.window.store.sums
        show_records(self, self.window, self._open_window(), self.update, getattr(self.window, "noise", None))

    def let_windows_span_batches(self) -> None:
        """Make the step ready for :meth:`set_accumulation_steps` , for a cell without `accumulation_steps` .

        Raises:
            ValueError: If the network has several losses, or one that needs the whole window at once.
            RuntimeError: If the step has run: its graph is for windows of one batch.
        """
        if self.spans_batches:
            return
        compatibility.check(SPAN_LATER, _NAME, self._setup)
        if self.provenance.begun:
            raise RuntimeError(
                "For 'TrainOneStepWithGradAccumulationCell', windows of several batches must be asked for before the "
                "first step, but got a step that has run, of a cell with accumulation_steps=1. Give the cell "
                "accumulation_steps > 1."
            )
        if not self._setup.o.accumulates:
            warn_about_batch_norm(self.network)  # has not been, for nothing was split
        self.spans_batches = True
        self.window = self._make_window(spans_batches=True)
        self.update.take_window(self.window.open)
        self.end_window = WindowEnd(self.window.open, self.update, self._jit)
        self._show_records()
        self._keep_in_place()

    @property
    def micro_batch_size(self) -> int | None:
        """Samples in a micro-batch, where the cell's `micro_batch_size` was given; with ``"auto"`` , what was found, or
        halved since; ``None`` before the first batch."""
        return self.window.micro_batch_size

    @property
    def loss_scaling_manager(self) -> nn.Cell | None:
        """The Cell that adjusts the loss scale, as in `nn.TrainOneStepWithLossScaleCell`."""
        return self.update.manager

    def set_sense_scale(self, sens: ms.Tensor) -> None:
        """Set the loss scale, as the method of this name of `nn.TrainOneStepWithLossScaleCell` does.

        Args:
            sens (Tensor): The new scale, of the shape of the old one.
        """
        self.update.set_scale(sens)

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Let windows to come, not one that is open, have another number of batches. Nothing is compiled anew.

        Args:
            accumulation_steps (int): Batches that share an update.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is less than 1.
            RuntimeError: If it is more than 1, and the step has run with windows of one batch.
        """
        check_positive_int(_NAME, "accumulation_steps", accumulation_steps)
        if accumulation_steps > 1:
            self.let_windows_span_batches()
        if self.spans_batches:
            self._begin()
            self.window.open.set_steps(accumulation_steps)

    def flush(self) -> bool:
        """Update with the batches that the open window has, divided by what they count; without any, do nothing.

        In data parallel mode a collective: all ranks must call it equally often, and one with an open window is enough
        for an update; a rank without contributes a count of zero.

        Returns:
            bool, whether an update was made.
        """
        self._begin()
        if not self.spans_batches:
            return False
        self._let_ranks_agree()
        with graphs.compiling_alone():
            if self._auto is not None:
                self._auto.agree()
            return self.end_window.flush()

    def _open_window(self) -> OpenWindow | None:
        return self.window.open if self.spans_batches else None

    def __call__(self, *inputs):
        self._begin()
        self._check_batch(inputs)
        try:
            outputs = self._run(*inputs)
        except BaseException as error:
            forget_interrupted_gradient(error)
            self.window.reset_eagerly()  # what the window's first micro-batches left would be added to the next batch's
            if self.update.has_statistics and not int(self.window_position.asnumpy()):
                self.update.statistics.reset_eagerly()
            explain_sparse_gradients(error)
            raise
        if self._counts:
            self._check_count(inputs)
        return outputs

    def _run(self, *inputs: ms.Tensor) -> Any:
        if self._unrolled:
            with auto_parallel.settings_of(self._given[0]):
                auto_parallel.check_device()
                return graphs.run(self, False, *inputs)
        self._let_ranks_agree()
        with graphs.compiling_alone():
            return self._train(*inputs)

    def _let_ranks_agree(self) -> None:
        """Broadcast the weights, where that is asked for, once: ranks need not compile at the same time."""
        if not self._ranks_agree:
            broadcast_parameters(self)
        self._ranks_agree = True

    def _train(self, *inputs: ms.Tensor) -> Any:
        if self._auto is not None:
            return self._auto(inputs)
        return graphs.run(self, self._jit, *inputs)

    def _check_batch(self, inputs: tuple[Any, ...]) -> None:
        """One clear error before anything runs. A first batch smaller than micro_size is a mistake, a later one a
        short last batch."""
        shapes = micro_batches.batch_shapes(inputs)
        if self._unrolled:
            auto_parallel.check_batch(shapes, self._micro_size)
            return
        plan = micro_batches.plan_split(shapes, self._micro_size, self.window.micro_batch_size)
        self.window.check_plan(plan)  # first, because all ranks must
        too_short = self._micro_size is not None and self._micro_size > plan.samples
        if too_short and not int(self.batch_count.asnumpy()):
            raise ValueError(
                f"For 'GradAccumulationCell', the argument 'micro_size' is the number of micro-batches and must not "
                f"be larger than the batch, but got micro_size={self._micro_size} and a batch of {plan.samples} "
                f"sample(s). Use a larger batch or a smaller 'micro_size'; samples per micro-batch are set by "
                f"'micro_batch_size'."
            )

    def _check_count(self, inputs: tuple[ms.Tensor, ...]) -> None:
        """The graph did not update with a bad count, on any rank; here the user learns of it."""
        total = (self.batch_items if self.spans_batches else self.window_count).asnumpy()
        if (total == total).all():
            return
        plan = micro_batches.plan_split(
            micro_batches.batch_shapes(inputs), self._micro_size, self.window.micro_batch_size
        )
        counted = [
            [
                float(count(*(value[start : start + plan.size] for value in inputs)))
                for start in range(0, plan.samples, plan.size)
            ]
            for count in self._counts
        ]
        kept = "The batch is left out of its window"
        if not self.spans_batches:
            kept = "Where these are fine, another rank's are not. Nothing was changed"
        raise ValueError(
            f"For 'GradAccumulationCell', 'count' must return a finite number of items that is not negative, but got "
            f"{counted} for the micro-batches of this rank. {kept}: correct 'count' and go on."
        )

    # -- compiled ------------------------------------------------------------------------------------------------------

    def construct(self, *inputs):
        if self._not_one_graph:
            raise RuntimeError(self._not_one_graph)
        auto_parallel.check_built_for(self._unrolled)
        scale = self.update.scale()
        inputs = clear_flag(inputs)
        if self.spans_batches:
            loss = self.window.add_batch(inputs, scale)
            overflow = ms.Tensor(False, ms.bool_)
            if self.window.open.is_complete(loss):
                overflow = self.end_window(loss)
                loss = ops.depend(loss, overflow)
        else:
            loss, overflow = self.update(*self.window.run(inputs, scale))
        loss = ops.depend(loss, ops.assign_add(self.batch_count, ms.Tensor(1, ms.int32)))
        if self.update.scaled:
            return loss, overflow, scale
        return loss
