"""GradAccumulator: accumulation for hand-written training loops, which compute their gradients themselves.

The loop's batches are the micro-batches. Reduction, clipping, loss scaling and counts work as in the training step:
both use open_window.py, ledger.py and update.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.accumulators import GradientSums
from gaccum_ms.accumulation.ledger import BATCHES, COUNTS, SAMPLES, TOTALS, DividedAfterwards
from gaccum_ms.accumulation.open_window import OpenWindow
from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import Update, WindowEnd
from gaccum_ms.backend import graphs
from gaccum_ms.backend.parameters import counter, expose_records, hold_weights, overwrite
from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.checks.batches import NEEDS_COUNT, check_gradients, check_rule, checked_count, checked_loss
from gaccum_ms.checks.other_names import explains_other_names
from gaccum_ms.losses import counts
from gaccum_ms.options.accumulators import Accumulators
from gaccum_ms.record.run_record import RULES, RunRecord
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.admission import Scaling, accumulator_options, admit_weights, can_compile, refuse_graphs
from gaccum_ms.training.advice import AdviceOfLoop, LossAdvice, proof_of_loop
from gaccum_ms.training.bad_counts import NoCount
from gaccum_ms.training.compiled_state import lost_state, refuse_lost_state, warn_of_lost_state
from gaccum_ms.training.gradients_of_batch import CallsOfFunctions, value_and_grad
from gaccum_ms.training.lifecycle import Lifecycle
from gaccum_ms.training.loop_records import LoopRecords
from gaccum_ms.training.loop_reduction import LoopReduction
from gaccum_ms.training.schedulers import Schedulers

_NAME = "GradAccumulator"


class GradAccumulator(nn.Cell):
    r"""
    Add up gradients over successive batches, and update once for `accumulation_steps` of them.

    It is for functional loops, in PyNative mode or inside a function under `mindspore.jit`, as in MindSpore's tutorial
    `Model Training <https://www.mindspore.cn/tutorials/en/master/beginner/train.html>`_ . A call of the accumulator
    replaces the call of the optimizer. If :math:`g_i` is the gradient of batch :math:`i`'s mean loss and :math:`c_i`
    its count, the update's gradient is :math:`\sum_i g_i c_i / \sum_i c_i` over the window and all ranks, reduced once
    per update.

    Args:
        optimizer (Optimizer): Any `nn.Optimizer` ; gradients come in the order of its `parameters` .
        accumulation_steps (int): Batches that share an update.

    Keyword Args:
        max_grad_norm (float, optional): Scale the finished, reduced gradient down to this global norm if its norm is
            larger; infinity only records the norm. Default: ``None`` , no clipping.
        transforms (Sequence, optional): As in :class:`GradAccumulationCell` . Default: ``()`` .
        accumulators (Accumulators, optional): How gradients are kept while they add up.
            Default: ``None`` , ``Accumulators()`` .
        overflow (str, optional): The effect of a gradient that is not finite. ``"drop_window"`` : with a loss scale,
            the window does not update. ``"drop_micro_batch"`` : the batch is left out, only on its rank.
            Default: ``"drop_window"`` .
        scale_sense (Union[Cell, Tensor], optional): Loss scale, as in
            :class:`TrainOneStepWithGradAccumulationCell` ; the loss must then go through :meth:`scale` before it is
            differentiated, or be multiplied by this cell's ``scale_sense`` . Default: ``None`` .
        jit (bool, optional): Compile the accumulator in PyNative mode too, where it takes a fraction of the time; with
            a transform or optimizer without source, with a lambda within other code, or with state that it keeps
            outside of Parameters, it runs eagerly, and a warning says so. ``False`` : run it eagerly. Default:
            ``True`` .
        reduction (str, optional): What the gradients are of: ``"mean"`` , a batch's mean loss; ``"sum"`` , a sum over
            its items, divided by the window's total count, or without counts a sum over the window. A sum over no items
            is added, a mean is not. Default: ``None`` , what the loss in the `nn.WithLossCell` of
            :meth:`value_and_grad` says, else a mean.
        min_count (float, optional): The least total count that a window is divided by, over all ranks. A window of
            total 0 then updates too. Default: ``None`` , such a window makes no update.
        scheduler (Union[LRScheduler, Sequence[LRScheduler]], optional): Schedulers of
            `mindspore.experimental.optim.lr_scheduler` for the optimizer, stepped once per update, in this order.
            Checkpoints hold their state, and :func:`resume` restores it. Default: ``None`` .
        check (str, optional): Measure the loss of a function of :meth:`value_and_grad` at the first batch, as in
            :class:`GradAccumulationCell` ; where calls give a `count` , at the second batch. Default:
            ``"first_batch"`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The gradients of the batch's loss: one for each of the optimizer's parameters,
          of its shape. They must not be reduced over ranks, which is not checked: leave out
          `nn.DistributedGradReducer` .
        - **count** (Union[Tensor, float], optional) - The number of items in the mean or sum, shape :math:`()`. Give it
          with every batch of a window or with none; inside `mindspore.jit` this is not checked, and a batch with a bad
          count is left out silently. With counts, the mean is exact over all ranks. Without them, gradients of
          :meth:`value_and_grad` , and others that are computed from these, weigh by their samples, all others alike,
          and MindSpore's ``gradients_mean`` decides between mean and sum over ranks. Default: ``None`` .
        - **loss** (Union[Tensor, float], optional) - The batch's loss, without loss scale, for :meth:`record` ; shape
          :math:`()`. Give it with every batch of a window or with none. Default: ``None`` .

    Outputs:
        bool, whether there was an update: at a window's last batch, unless it was dropped. Inside `mindspore.jit`, a
        Tensor of shape :math:`()`.

        More values are in its Parameters: ``update_count`` , ``window_position`` and ``accumulation_steps`` , int32;
        ``window_count`` , ``dropped_micro_batches`` and, with `max_grad_norm` , ``grad_norm`` , float32, of the last
        window. `mindspore.save_checkpoint` of the accumulator saves them with the weights, the optimizer's state and
        the open window.

    Raises:
        TypeError: If an argument or gradient has another type than above; if there is no count, with `min_count` , or
            with sums and ``overflow="drop_micro_batch"`` ; if `scheduler` is no LRScheduler, as ReduceLROnPlateau,
            which needs a metric.
        ValueError: If an argument has a wrong value; if gradients do not match the optimizer's parameters in number and
            shapes; if a count is negative or not finite; if there is none with gradients that are computed from those
            of batches of several sizes; if a loss says another `reduction` than is given, or than another's; if the
            weights are in a DistributedDataParallel; if `scheduler` is for another optimizer, or keeps state outside of
            Parameters, which checkpoints would lose; in graph mode, if the optimizer or a transform changes values
            that are no Parameters, such as the entries of a list.
        RuntimeError: In semi-auto, auto and hybrid parallel mode; at the first gradients, if there is a `scale_sense`
            and no loss was scaled; with `scheduler` inside `mindspore.jit` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Parameter, Tensor, nn
        >>> from gaccum_ms import GradAccumulator
        >>> net = nn.Dense(1, 1, weight_init="ones", bias_init="zeros").set_train()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> accumulator = GradAccumulator(optimizer, 2)
        >>> grad_fn = accumulator.value_and_grad(nn.WithLossCell(net, nn.MSELoss()))
        >>> for x, y in [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]:
        ...     loss, gradients = grad_fn(Tensor([[x]]), Tensor([[y]]))
        ...     print(accumulator(gradients))
        False
        True
        False
        >>> print(accumulator.flush())
        True

        With sums and their counts, under a loss scale, where the window's second batch overflows:

        >>> from gaccum_ms import Accumulators, ClipByValue
        >>> weight = Parameter(Tensor([1.0]), name="weight")
        >>> accumulator = GradAccumulator(
        ...     nn.SGD([weight], learning_rate=0.1),
        ...     2,
        ...     max_grad_norm=float("inf"),
        ...     transforms=(ClipByValue(2.0),),
        ...     accumulators=Accumulators(compensated=True),
        ...     overflow="drop_micro_batch",
        ...     scale_sense=Tensor(1024.0),
        ...     reduction="sum",
        ...     min_count=1,
        ...     jit=False,
        ... )
        >>> for total in (9.0, float("inf")):  # a batch's loss, and its gradient
        ...     gradients = (Tensor([total]) * accumulator.scale_sense,)
        ...     updated = accumulator(gradients, count=2, loss=total)
        >>> record = accumulator.record()
        >>> print(updated, weight.asnumpy(), record.loss, record.grad_norm, record.count, record.dropped_micro_batches)
        True [0.8] 4.5 4.5 2.0 1
    """

    called_by_python = False  # see graphs.py
    spans_batches = True  # as a step whose windows have several batches, for records

    @explains_other_names
    def __init__(
        self,
        optimizer: nn.Optimizer,
        accumulation_steps: int,
        *,
        max_grad_norm: float | None = None,
        transforms: Sequence[Any] = (),
        accumulators: Accumulators | None = None,
        overflow: str = "drop_window",
        scale_sense: nn.Cell | ms.Tensor | None = None,
        jit: bool = True,
        reduction: str | None = None,
        min_count: float | None = None,
        scheduler: Any = None,
        check: str | None = "first_batch",
    ) -> None:
        super().__init__(auto_prefix=False)
        check_positive_int(_NAME, "accumulation_steps", accumulation_steps)
        options = accumulator_options(
            max_grad_norm=max_grad_norm,
            transforms=transforms,
            accumulators=accumulators,
            overflow=overflow,
            jit=jit,
            reduction=reduction,
            min_count=min_count,
            check=check,
        )
        graphs.check_compilable(_NAME, False, "transforms", options.transforms)
        weights = admit_weights(_NAME, optimizer)
        schedulers = scheduler if isinstance(scheduler, (list, tuple)) else (scheduler,)
        self._schedulers = None if scheduler is None else Schedulers(_NAME, "scheduler", schedulers)
        if self._schedulers is not None:
            self._schedulers.check_optimizer(optimizer, "the accumulator calls")
        self._scaling = Scaling(needed=scale_sense is not None)
        self.optimizer = optimizer
        hold_weights(self, weights)
        self._jit = jit and can_compile((*options.transforms, optimizer))
        self.drops = options.drops
        self.loss_is_mean = options.loss_is_mean
        self.needs_count = min_count is not None
        self._no_count = NoCount(min_count)
        self.window_position = counter("window_position")
        run_record = RunRecord(_NAME, ("batches", "samples", "counts", "sums"), accumulation_steps, None)
        store = GradientSums(weights, options.accumulators.dtype, options.accumulators.compensated)
        self.window = OpenWindow(_NAME, store, self.window_position, accumulation_steps)
        self.ledger = DividedAfterwards(options, weights, store, self.window, rule=run_record.window_rule)
        self.update = Update(_NAME, optimizer, weights, self.ledger, options, scale_sense)
        find_lost_state = functools.cache(functools.partial(lost_state, self.update))
        if not graphs.runs_eagerly(self._jit) and (state := find_lost_state()) is not None:
            if ms.get_context("mode") == ms.GRAPH_MODE:
                refuse_lost_state(_NAME, state)
            warn_of_lost_state(_NAME, state)
            self._jit = False
        self.end_window = WindowEnd(self.ledger, self.update, self._jit)
        self.accu_grads = store.sums
        expose_records(self, self.window, self.ledger, self.update, *self.update.links)
        self.batch_count = counter("batch_count")
        self.run_record = run_record
        # A loop without accumulation calls the optimizer alone, which names what it holds.
        lasting = self.run_record, self.update, self.window, self.window_position
        self._lifecycle = Lifecycle(*lasting, self._jit, named=optimizer)
        self._lifecycle.keep_in_place(self)
        self._reduction = LoopReduction(options)
        self._take_reduction()
        self._calls = CallsOfFunctions()
        # Python runs these in PyNative mode, and at compile time in graph mode.
        self._settle_reduction = ops.constexpr(self._reduction.settle)
        self._note_scaling = ops.constexpr(self._scaling.note)
        self._check_scaling = ops.constexpr(self._scaling.check)
        self._one, self._zero = ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
        self._records = LoopRecords()
        self._note_loss = ops.constexpr(self._records.note_loss)
        self._advice = AdviceOfLoop(_NAME, weights)
        self._look = ops.constexpr(self._advice.look)
        self.has_scheduler = scheduler is not None
        self._refuse_caller = ops.constexpr(refuse_graphs)
        self._refuse_lost_state = ops.constexpr(lambda: refuse_lost_state(_NAME, find_lost_state()))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "scale_sense":  # a loop may multiply by it, and not call `scale`
            self._scaling.note()
        return value

    def value_and_grad(self, function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """As `mindspore.value_and_grad` , of the optimizer's parameters; but a call of the accumulator weighs the
        gradients by the samples in their batch. It is outside of `mindspore.jit` . Other gradients that are computed
        from these, as by clipping or adding those of two losses, weigh by the samples of the calls since the
        accumulator's last call. If these calls had several numbers of samples, give a `count` .

        A bare `nn.WithLossCell` says whether its loss is a mean or a sum, if `reduction` of the accumulator does not.

        Args:
            function (Union[Cell, Callable]): Returns the loss; the first axis of its first input is that of samples.
            has_aux (bool): Whether it returns more than the loss. Default: ``False`` .

        Returns:
            Callable, returns what `function` does, and the gradients, a tuple.

        Raises:
            ValueError: If its loss says another `reduction` than is given, or than that of an earlier function; if its
                loss has ``reduction="none"`` .
        """
        self._advice.note(function)
        self._reduction.take(function, has_aux)
        self._take_reduction()
        batches = int(self.window.accumulation_steps.asnumpy())
        proof = proof_of_loop(_NAME, function, self._reduction.options_of(has_aux), batches)
        self.run_record.loss_check = proof
        advice = LossAdvice(_NAME, function, (None,), batches if self.loss_is_mean else 0, proof)
        return value_and_grad(function, self.weights, has_aux, self._calls, advice)

    def _take_reduction(self) -> None:
        """Before anything is compiled, take what the losses are."""
        self.loss_is_mean = self._reduction.value != "sum"
        self.rule_without_count = BATCHES if self.loss_is_mean else TOTALS
        self.ledger.loss_is_mean = self.loss_is_mean
        if self.drops and not self.loss_is_mean:
            self.needs_count = True
        self.run_record.reduction = self._reduction.value

    def extend_repr(self) -> str:
        """In ``print(accumulator)`` ."""
        return f"accumulation_steps={self.window.accumulation_steps.asnumpy()}, reduction={self._reduction.value!r}"

    def scale(self, loss: ms.Tensor) -> ms.Tensor:
        """The loss times the loss scale; with `scale_sense` , differentiate this."""
        self._note_scaling()
        return loss * self.update.scale()

    def flush(self) -> bool:
        """Update with the batches of the open window; without batches, train nothing. All ranks must call it equally
        often; a rank without batches contributes a count of zero. Without any, the last window's records become 0.
        An interrupted flush keeps the window, or drops it with a warning if the optimizer may have written.

        Returns:
            bool, whether there was an update.
        """
        self._calls.take()
        self._begin_call()
        self._records.begin(self)
        had_batches = bool(self.window.batches)
        updated = self.end_window.flush()
        self._end_call(had_batches or updated)
        return updated

    def clear(self) -> None:
        """Discard the open window and its batches. All ranks must call this."""
        self._calls.take()
        self._lifecycle.begin_call()
        self.window.reset_eagerly()
        self._records.clear(self)

    @contextlib.contextmanager
    def no_update(self) -> Iterator[None]:
        """Context manager in which calls only add: a window continues past its last batch, and ends with the first call
        after it. All ranks must enter it."""
        self._lifecycle.begin_call()
        overwrite(self.window.updates_held, self.window.updates_held + 1)
        try:
            yield
        finally:
            overwrite(self.window.updates_held, self.window.updates_held - 1)

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of batches that share an update, at least 1, in later windows; an open one keeps its own.
        Nothing is compiled anew."""
        check_positive_int(_NAME, "accumulation_steps", accumulation_steps)
        self._lifecycle.begin_call()
        self.window.set_steps(accumulation_steps)

    def set_sense_scale(self, sens: ms.Tensor) -> None:
        """Set the loss scale, as `nn.TrainOneStepWithLossScaleCell.set_sense_scale` does. First add the gradients of
        all losses that were scaled before."""
        self.update.set_scale(sens)

    def __call__(self, gradients: Sequence[ms.Tensor], count: Any = None, loss: Any = None) -> bool:
        calls = self._calls.take()
        check_gradients(gradients, self.weights)
        self._scaling.check()
        self._look()
        if count is not None:
            count = checked_count(count)
        elif self.needs_count:
            raise TypeError(NEEDS_COUNT)
        if loss is not None:
            loss = checked_loss(loss)
        rule = COUNTS
        if count is not None:
            calls.look(gradients, count)
        else:
            rule, samples = self.rule_without_count, calls.samples_of(gradients) if self.loss_is_mean else None
            calls.look(gradients, None)
            if samples is not None:
                count, rule = ms.Tensor(samples, ms.float32), SAMPLES
                self.run_record.note_batch(samples)
        self._begin_call()
        check_rule(RULES[rule], RULES[int(self.run_record.window_rule.asnumpy())], self.window.batches, count)
        self._records.begin(self)
        self._records.check_loss(loss)
        gradients = ms.mutable(tuple(gradients))  # else a constant, and each call would compile a graph
        # All are Tensors, so that one graph serves all calls.
        count = self._one if count is None else count
        inputs = (gradients, count, self._zero if loss is None else loss, ms.Tensor(rule, ms.int32))
        try:
            added = graphs.run(self, self._jit, *inputs)
            updated = self.window.is_full and self.end_window.updates_after(added)
        except BaseException:
            self.window.drop_if_torn()
            raise
        self._records.add(loss, count)
        ended = not self.window.batches
        self._end_call(ended)
        if ended:
            self._no_count.warn(_NAME, self.window_count, self.dropped_micro_batches)
        return updated

    def _begin_call(self) -> None:
        if self.run_record.reduction is None:
            self._reduction.settle()
            self.run_record.reduction = self._reduction.value
        self._lifecycle.begin_batch()
        self._step_schedulers()  # a checkpoint may be from between an update and its schedulers

    def _end_call(self, ended: bool) -> None:
        """`ended` : whether a window has."""
        if ended:
            self._records.end(self)
        self._step_schedulers()

    def _step_schedulers(self) -> None:
        if self._schedulers is not None:
            self._schedulers.follow(int(self.update_count.asnumpy()))

    def record(self, epoch: int | None = None) -> WindowRecord:
        """The record of the last window that has ended, with this `epoch` .

        Returns:
            WindowRecord. If the accumulator was called inside `mindspore.jit` , it has no `losses` and `counts` ; call
            this once per update then.

        Raises:
            RuntimeError: If no window has ended since the accumulator was made.
        """
        return self._records.record(self, epoch)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which the weights have the values of their averages, as that of the training step."""
        return self._lifecycle.averaged_weights()

    def check_names_and_refresh_name(self):
        """MindSpore calls this before a Cell's first call."""
        self._lifecycle.refresh_names()

    def init_parameters_data(self, *args, **kwargs):
        """MindSpore calls this before it saves a checkpoint."""
        self._lifecycle.prepare_save()
        return super().init_parameters_data(*args, **kwargs)

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Load a checkpoint's values, by name, also in the middle of training; `gaccum_ms.resume` checks them."""
        self._calls.take()
        self._lifecycle.load(self, values)
        self._records.begin_anew(self)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def construct(self, gradients, count=None, loss=None, rule=None):
        if self.needs_count and count is None:  # within a function under `mindspore.jit` : at compile time
            raise TypeError(NEEDS_COUNT)
        if self.has_scheduler and not self.called_by_python:
            self._refuse_caller()
        if not self.called_by_python:
            self._refuse_lost_state()
        self._check_scaling()
        self._settle_reduction()
        self._look()
        scale = self.update.scale()
        items = ops.ones((), ms.float32) if count is None else counts.valid_or_nan(count)
        unit = self.ledger.begin(scale, items)
        weight = unit / scale  # the gradients contain the scale
        if self.loss_is_mean:
            weight = weight * items
        # Before the branch: within it, a graph reads some views at a wrong address (see graphs.py).
        weighed = self.ledger.weighed(gradients, weight)
        numerator = ops.zeros_like(items)
        if loss is not None:
            numerator = ops.cast(loss, ms.float32).reshape(()) * weight * scale
        row = self.ledger.enter(unit, numerator, items, weighed)
        seen = ops.assign_add(self.batch_count, ms.Tensor(1, ms.int32))
        if rule is None:  # within a function under `mindspore.jit`
            rule = ms.Tensor(self.rule_without_count if count is None else COUNTS, ms.int32)
            if loss is not None:
                self._note_loss()
        seen = ops.depend(seen, ops.assign(self.run_record.window_rule, rule))
        ended = self.ledger.end(row, ops.depend(items, seen))
        if self.called_by_python:  # `__call__` ends the window
            return clear_flag(ops.neg(ended))
        updates = self.update_count + 0
        updated = ops.depend(updates, ended) > updates
        if self.window.is_complete(ended):
            overflow = self.end_window.of_full(ended)
            updated = ops.depend(self.update_count, overflow) > updates
        return clear_flag(updated)  # for the next batch's backward, which is the user's
