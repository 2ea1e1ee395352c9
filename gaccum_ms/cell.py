"""GradAccumulationCell: checks and holds the options of accumulation. The arithmetic is in train_step.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.batch_loss import WithBatchLossCell
from gaccum_ms.batch_loss import check_options as check_batch_loss_options
from gaccum_ms.held_cells import held_cells
from gaccum_ms.options import check_accumulation_options, check_one_of, check_positive_int, described
from gaccum_ms.out_of_memory import check_test as check_out_of_memory_test
from gaccum_ms.pynative_tape import close_tape

_NAME = "GradAccumulationCell"

# The training step has them compiled in.
_OPTIONS = frozenset(
    (
        "accumulation_steps",
        "accumulator_dtype",
        "compensated",
        "count",
        "counts",
        "is_out_of_memory",
        "jit",
        "loss_weights",
        "max_grad_norm",
        "memory_limit",
        "micro_batch_size",
        "micro_size",
        "network",
        "overflow",
        "record_noise",
        "reduction",
        "shard_accumulators",
    )
)
# Cells that accumulate by themselves: MindSpore's, of nn, of parallel.nn and of boost, and ours.
_ACCUMULATE = ("GradAccumulation", "GradAccumulationCell", "GradientAccumulation")


def _losses(count: Any, loss_weights: Any) -> tuple[tuple[Callable | None, ...], tuple[float, ...]]:
    """One count (None: samples) and one weight for each loss of the network."""
    several = isinstance(count, (tuple, list))
    counts = tuple(count) if several else (count,)
    for one in counts:
        if one is not None and not callable(one):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'count' must be a function or Cell that maps the network's "
                f"inputs to a number of items, or one for each loss, but got {one!r}."
            )
    if loss_weights is None:
        loss_weights = (1.0,) * len(counts)
    if not isinstance(loss_weights, (tuple, list)) or any(
        isinstance(weight, bool) or not isinstance(weight, (int, float)) for weight in loss_weights
    ):
        raise TypeError(
            f"For 'GradAccumulationCell', the argument 'loss_weights' must be a sequence of floats, but got "
            f"{loss_weights!r}."
        )
    if not loss_weights or not all(math.isfinite(weight) for weight in loss_weights):
        raise ValueError(
            f"For 'GradAccumulationCell', the argument 'loss_weights' must be finite, one for each loss, but got "
            f"{loss_weights!r}."
        )
    if count is None:
        counts = (None,) * len(loss_weights)
    if len(counts) != len(loss_weights):
        raise ValueError(
            f"For 'GradAccumulationCell', 'count' and 'loss_weights' must have one entry for each loss, but got "
            f"{len(counts)} count(s) and {len(loss_weights)} weight(s)."
        )
    return counts, tuple(float(weight) for weight in loss_weights)


class _Undifferentiated(nn.Cell):
    """Hands on what it gets, and refuses to be differentiated."""

    def construct(self, outputs):
        return outputs

    def bprop(self, outputs, out, dout):
        raise RuntimeError(_DIFFERENTIATED)


class GradAccumulationCell(nn.Cell):
    r"""
    Split each batch into micro-batches and update once, as if the whole batch had gone through at once.

    The cell holds the network and the options. `mindspore.Model` and `mindspore.amp.build_train_network` build the
    training step, :class:`TrainOneStepWithGradAccumulationCell`, from it. It has the signature of
    `mindspore.nn.GradAccumulationCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.
    GradAccumulationCell.html>`_, and in addition works stand-alone and in data parallel mode, on CPU too, reports the
    mean loss, and accepts batches that do not divide.

    Args:
        network (Cell): The network with its loss, such as `nn.WithLossCell`. Its output is a scalar, shape
            :math:`()`: the mean over the samples of its inputs, or what `reduction` and `count` say; or a tuple of
            such losses, with one `count` or `loss_weights` entry for each. A :class:`WithBatchLossCell` where the loss
            compares the samples of a batch.
        micro_size (int, optional): **Number** of micro-batches per batch. Each has
            :math:`\lceil N / \text{micro_size} \rceil` samples; the last may be smaller. Default: ``None`` .

    Keyword Args:
        micro_batch_size (Union[int, str], optional): Number of samples in a micro-batch, in place of `micro_size` ;
            the last may be smaller. ``"auto"`` : the largest that fits, which the first batch's training finds, as
            :func:`find_micro_batch_size` does; where memory runs out later, the batch is trained with half of it, and
            all ranks go on with that. Default: ``None`` .
        accumulation_steps (int, optional): Successive batches that share an update; the window has `micro_size` times
            as many micro-batches. Ranks then weigh by their samples or counts, and the loss of each call is the
            batch's own mean, on this rank. Only the window's last batch reduces, updates, and counts as an update:
            see :class:`FlushAccumulation` for the batches that are left at the end. Default: ``1`` .
        reduction (str, optional): What the network's loss is over its inputs, ``"mean"`` or ``"sum"`` . A sum without
            `count` stays a sum, of the whole batch; with `count` it is divided by the total count.
            Default: ``"mean"`` .
        count (Union[Callable, Sequence], optional): A function or Cell that maps the network's inputs to the number
            of items that its mean was taken over, a number or a scalar Tensor: valid tokens, unpadded pixels, the sum
            of weights (:class:`CountNotIgnored` and :class:`CountMask` are ready made). Gradient and loss of a window
            are then :math:`\sum_i L_i c_i / \sum_i c_i` over all micro-batches **and ranks**, whatever
            ``gradients_mean`` says; what counts 0 contributes nothing, and a window that counts 0 does not update. It
            must be finite and not negative; with data sinking, where no Python runs between steps, a bad count is not
            reported but never updates. For a network that returns a
            tuple of losses, one for each; ``None`` counts samples. Default: ``None`` , samples.
        loss_weights (Sequence[float], optional): For a network that returns a tuple of losses, the weight of each in
            their sum. Default: ``None`` , 1 for each.
        max_grad_norm (float, optional): Scale the finished, reduced gradient down to this global norm where it is
            larger, as `mindspore.ops.clip_by_global_norm` does. Default: ``None`` , no clipping.
        accumulator_dtype (mindspore.dtype, optional): Dtype of the accumulators, float32, float16 or bfloat16; ``None``
            gives each the dtype of its weight. In windows of several batches they hold multiples of the first one's
            mean: float16 overflows where later ones count thousands of times as much. Default: ``mindspore.float32`` .
        compensated (bool, optional): Sum with Kahan's compensation, which keeps in a float32 Parameter for each
            accumulator what its rounding loses. Default: ``False`` .
        overflow (str, optional): What a gradient that is not finite does. ``"drop_window"`` : with a loss scale, the
            window does not update. ``"drop_micro_batch"`` : the micro-batch is left out, on its rank alone, and the
            rest divided by what all ranks have left; ranks then weigh by their samples or counts. A dynamic loss scale
            comes down then too.
            Default: ``"drop_window"`` .
        shard_accumulators (bool, optional): In data parallel mode, let each rank keep its part of the accumulators
            alone. Each micro-batch's gradient is then reduced over ranks at once: communication grows with the number
            of micro-batches, which must be the same on all ranks. Default: ``False`` .
        record_noise (bool, optional): Record what :class:`GradNoiseScale` , :class:`AdaptiveAccumulation` and
            :class:`AdaScale` read: the squared norms of the gradients of the window's first micro-batch and of the
            window, in ``noise_sums`` and ``grad_norm`` of the step. Default: ``False`` .
        memory_limit (int, optional): With ``"auto"`` , bytes that this rank may have, as in
            :func:`find_micro_batch_size` . Default: ``None`` , what there is.
        is_out_of_memory (Callable, optional): With ``"auto"`` , says of an error whether it means that memory is not
            enough. Default: ``None`` , MemoryError, and RuntimeError in the words of MindSpore's allocators.
        jit (bool, optional): In PyNative mode, compile the training step all the same. Default: ``None`` , run it
            eagerly, so that breakpoints work. Graph mode always compiles, and so does ``"auto"`` .

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs, each of shape :math:`(N, ...)`.

    Outputs:
        Tensor of shape :math:`()`, the network's loss on the inputs, not split: the cell called by itself, outside
        training, is the network.

    Raises:
        TypeError: If `network` is not a Cell, a size or `memory_limit` not an int, `max_grad_norm` not a number,
            `count` or `is_out_of_memory` not callable, `loss_weights` not numbers, `accumulator_dtype` not a dtype, or
            `compensated` , `shard_accumulators` , `record_noise` or `jit` not a bool.
        ValueError: If `network` holds a cell that accumulates or trains by itself, such as MindSpore's; if both or
            neither of `micro_size` and `micro_batch_size` are given; if one is less than 1; if
            `max_grad_norm` is not positive and finite, a loss weight not finite, `reduction` , `overflow` or
            `accumulator_dtype` not one of those above; if `count` and `loss_weights` differ in length; if
            ``overflow="drop_micro_batch"`` is given with several losses, or with a sum that has no count; if sums are
            given `loss_weights` without a count for each; if several losses are given `accumulation_steps` ; if
            `shard_accumulators` is given with several losses or ``overflow="drop_micro_batch"`` ; if `record_noise` is
            given with several losses, with a sum that has no count, or with `shard_accumulators` ; if
            ``micro_batch_size="auto"`` is given with several losses, `shard_accumulators` or a WithBatchLossCell, or
            ``jit=False`` , or `memory_limit` or `is_out_of_memory` without it; if `network` is a WithBatchLossCell, for
            `accumulation_steps` , `count` , `loss_weights` , `record_noise` and ``overflow="drop_micro_batch"`` .
        RuntimeError: If the cell itself is trained, by a training cell that does not know how to accumulate, or
            differentiated, as by `mindspore.value_and_grad` .
        AttributeError: If an option is assigned to after the training step was built from the cell.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4)
        >>> model = ms.Model(cell, optimizer=optimizer)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
        >>> model.train(1, data_set)
        >>> print(net.weight.asnumpy().round(4))
        [[0.4 0.4 0.4]]
    """

    def __init__(
        self,
        network: nn.Cell,
        micro_size: int | None = None,
        *,
        micro_batch_size: int | str | None = None,
        accumulation_steps: int = 1,
        reduction: str = "mean",
        count: Callable | Sequence[Callable | None] | None = None,
        loss_weights: Sequence[float] | None = None,
        max_grad_norm: float | None = None,
        accumulator_dtype: ms.Type | None = ms.float32,
        compensated: bool = False,
        overflow: str = "drop_window",
        shard_accumulators: bool = False,
        record_noise: bool = False,
        memory_limit: int | None = None,
        is_out_of_memory: Callable[[BaseException], bool] | None = None,
        jit: bool | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'network' must be a Cell, but got "
                f"'{type(network).__name__}'. Wrap the network and its loss in 'nn.WithLossCell'."
            )
        refuse_accumulation_inside(network)
        check_positive_int(_NAME, "accumulation_steps", accumulation_steps)
        if micro_size is None and micro_batch_size is None and accumulation_steps > 1:
            micro_size = 1
        if (micro_size is None) == (micro_batch_size is None):
            raise ValueError(
                f"For 'GradAccumulationCell', exactly one of 'micro_size' (number of micro-batches) and "
                f"'micro_batch_size' (samples in one) must be given, or neither with 'accumulation_steps' (batches "
                f"that share an update), but got micro_size={micro_size}, micro_batch_size={micro_batch_size} and "
                f"accumulation_steps={accumulation_steps}."
            )
        for name, value in (("micro_size", micro_size), ("micro_batch_size", micro_batch_size)):
            if value is not None and (name, value) != ("micro_batch_size", "auto"):
                check_positive_int(_NAME, name, value)
        check_accumulation_options(_NAME, max_grad_norm, accumulator_dtype, compensated, overflow, jit)
        check_one_of(_NAME, "reduction", reduction, ("mean", "sum"))
        self.counts, self.loss_weights = _losses(count, loss_weights)
        if reduction == "sum" and self.several_losses and None in self.counts:
            raise ValueError(
                f"For 'GradAccumulationCell', reduction='sum' with 'loss_weights' needs a 'count' for each loss, but "
                f"got count={count}. Give a count for each, or means."
            )
        if overflow == "drop_micro_batch" and (self.several_losses or (reduction == "sum" and count is None)):
            raise ValueError(
                f"For 'GradAccumulationCell', overflow='drop_micro_batch' divides what is left by its count, which "
                f"must be one loss's mean, or a sum with 'count', but got {len(self.loss_weights)} loss(es), "
                f"reduction='{reduction}' and count={count}. Use overflow='drop_window'."
            )
        if accumulation_steps > 1 and self.several_losses:
            raise ValueError(
                f"For 'GradAccumulationCell', 'accumulation_steps' must be 1 for a network of several losses, because "
                f"each is divided by a total of its own, which one accumulator cannot be once the first batches are in "
                f"it, but got accumulation_steps={accumulation_steps} and {len(self.loss_weights)} losses. Use larger "
                f"batches and 'micro_size'; or add the losses up in the network, where one total serves all."
            )
        if not isinstance(shard_accumulators, bool):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'shard_accumulators' must be a bool, but got "
                f"{shard_accumulators!r}."
            )
        if shard_accumulators and (self.several_losses or overflow == "drop_micro_batch"):
            raise ValueError(
                f"For 'GradAccumulationCell', 'shard_accumulators' reduces each micro-batch over all ranks, which "
                f"needs one loss, and that no rank leaves a micro-batch out by itself, but got "
                f"{len(self.loss_weights)} loss(es) and overflow='{overflow}'. Use overflow='drop_window', and add "
                f"losses up in the network."
            )
        if not isinstance(record_noise, bool):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'record_noise' must be a bool, but got {record_noise!r}."
            )
        if record_noise and (self.several_losses or shard_accumulators or (reduction == "sum" and count is None)):
            raise ValueError(
                f"For 'GradAccumulationCell', 'record_noise' compares the mean gradient of one micro-batch with the "
                f"window's, which needs one loss that is a mean, or a sum with 'count', and whole accumulators, but "
                f"got {len(self.loss_weights)} loss(es), reduction='{reduction}', count={count} and "
                f"shard_accumulators={shard_accumulators}. Use reduction='mean', add losses up in the network, and "
                f"leave 'shard_accumulators' out."
            )
        self.memory_limit = memory_limit
        self.is_out_of_memory = is_out_of_memory
        self.record_noise = record_noise
        self.shard_accumulators = shard_accumulators
        self.accumulation_steps = accumulation_steps
        self.reduction = reduction
        self.overflow = overflow
        self.accumulator_dtype = accumulator_dtype
        self.compensated = compensated
        self.network = network
        self.micro_size = micro_size
        self.micro_batch_size: Any = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.jit = True if micro_batch_size == "auto" else jit
        check_batch_loss_options(self)
        check_auto_options(self, jit)
        self._get_attr_from_cell(network)
        self._undifferentiated = _Undifferentiated()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS and self.__dict__.get("_has_step", False):
            raise AttributeError(
                f"For 'GradAccumulationCell', the option '{name}' must be set before the training step is built from "
                f"the cell, which has it compiled in, but got {described(value)} afterwards. Build another cell and "
                f"step; the step's own 'set_accumulation_steps' and 'set_sense_scale' work at any time."
            )
        super().__setattr__(name, value)

    def keep_options(self) -> None:
        """From here on, a training step has been built with them."""
        self._has_step = True

    @property
    def finds_size(self) -> bool:
        """Whether the training step is to find the size of micro-batches."""
        return self.micro_batch_size == "auto"

    @property
    def counted(self) -> bool:
        """Whether micro-batches weigh by what only the data tell, and not by their samples."""
        return any(count is not None for count in self.counts) or self.overflow == "drop_micro_batch"

    @property
    def several_losses(self) -> bool:
        """Whether losses must be weighed: one with weight 1 is what every network has."""
        return self.loss_weights != (1.0,)

    @property
    def accumulates(self) -> bool:
        """Whether there is anything to accumulate over: not with one micro-batch that always takes part."""
        return self.micro_size != 1 or self.accumulation_steps > 1 or self.counted or self.several_losses

    def set_grad(self, requires_grad: bool = True) -> GradAccumulationCell:
        """Refuse to be trained as an ordinary network (`nn.TrainOneStepCell` announces that with this call)."""
        if requires_grad:
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return super().set_grad(requires_grad)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.training and ms.get_context("mode") == ms.PYNATIVE_MODE:
            close_tape()
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return super().__call__(*inputs, **named)

    def construct(self, *inputs):
        if self.training:  # of a graph
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return self._undifferentiated(self.network(*inputs))


def refuse_accumulation_inside(network: nn.Cell) -> None:
    """What accumulates, or trains, must not be a part of what is accumulated over."""
    for name, cell in held_cells(network):
        if isinstance(cell, nn.TrainOneStepCell) or any(kind.__name__ in _ACCUMULATE for kind in type(cell).__mro__):
            where = f"'{name}' in it" if name else "the network"
            raise ValueError(
                f"For 'GradAccumulationCell', the argument 'network' must return a loss and neither accumulate nor "
                f"train by itself, but {where} is a '{type(cell).__module__}.{type(cell).__name__}'. Give the network "
                f"that it wraps."
            )


def check_auto_options(cell: GradAccumulationCell, jit: bool | None) -> None:
    """Refuse, with ``micro_batch_size="auto"`` , what needs all ranks in the middle of a batch, where each must be able
    to try again alone; without it, what is for it alone."""
    if not cell.finds_size:
        for name, value in (("memory_limit", cell.memory_limit), ("is_out_of_memory", cell.is_out_of_memory)):
            if value is not None:
                raise ValueError(
                    f"For 'GradAccumulationCell', the argument '{name}' is for micro_batch_size='auto', but got "
                    f"{name}={value!r} and micro_batch_size={cell.micro_batch_size!r}. Leave it out, or give 'auto'."
                )
        return
    if cell.memory_limit is not None:
        check_positive_int(_NAME, "memory_limit", cell.memory_limit)
    check_out_of_memory_test(_NAME, cell.is_out_of_memory)
    if jit is False:
        raise ValueError(
            f"For '{_NAME}', micro_batch_size='auto' compiles in PyNative mode too, because MindSpore's eager gradient "
            f"does not survive running out of memory, but got jit=False. Leave 'jit' out, or give a number of samples."
        )
    batch_loss = isinstance(cell.network, WithBatchLossCell)
    if cell.several_losses or cell.shard_accumulators or batch_loss:
        raise ValueError(
            f"For 'GradAccumulationCell', micro_batch_size='auto' needs one loss that is a mean or sum over samples, "
            f"and whole accumulators, so that each rank can try a batch again by itself, but got "
            f"{len(cell.loss_weights)} loss(es), shard_accumulators={cell.shard_accumulators} and a network of class "
            f"'{type(cell.network).__name__}'. Give the number of samples; 'find_micro_batch_size' finds it for what "
            f"is not a 'WithBatchLossCell'."
        )


# No functional gradient either has accumulated anything by the time it is there.
_DIFFERENTIATED = (
    "For 'GradAccumulationCell', the cell must not be differentiated, but a functional gradient of it is being taken, "
    "as by mindspore.value_and_grad(cell, ...). Nothing would be accumulated, counted or clipped. In a loop of your "
    "own, differentiate the network that you gave the cell, and hand the gradients to gaccum_ms.GradAccumulator; or "
    "call gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer)."
)

# The step calls the inner network, never the cell, so whoever gets here would train without accumulating, or not at
# all (`ms.Model` without an optimizer). A constant, because graph mode must be able to raise it.
_TRAINED_WITHOUT_STEP = (
    "For 'GradAccumulationCell', training must go through ms.Model(cell, optimizer=optimizer), "
    "mindspore.amp.build_train_network(cell, optimizer) or "
    "gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer), with the cell outermost, an optimizer and no "
    "loss_fn, and 'gaccum_ms' imported before build_train_network is; but the cell itself is being trained. As it is "
    "used here, no gradient would be accumulated."
)
