"""GradAccumulationCell: the network, with the options of accumulation. The arithmetic is in training/step.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms import compatibility
from gaccum_ms.backend.checks import described
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.compatibility import Setup
from gaccum_ms.options import Options, checked
from gaccum_ms.rules import CELL
from gaccum_ms.split import EvenSplit

_NAME = "GradAccumulationCell"

_OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))
_READ = frozenset(name for name in (*_OPTIONS, *vars(Options)) if not name.startswith("_"))
_SET = _OPTIONS | {"network", "options", "counts"}  # the training step has them compiled in
# Cells that accumulate by themselves: MindSpore's, of nn, of parallel.nn and of boost, and ours.
_ACCUMULATE = ("GradAccumulation", "GradAccumulationCell", "GradientAccumulation")


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
            `count` stays a sum, of the whole batch; with `count` it is divided by the total count. ``"ratio"`` : the
            network returns a tuple (numerator, denominator), a sum and the count of its items, scalars, where only the
            forward knows the count. The window's loss is then the sum of numerators over that of denominators, of all
            micro-batches and ranks, with all that is said of `count` below; no gradient goes through a denominator.
            Default: ``"mean"`` .
        count (Union[Callable, Sequence], optional): A function or Cell that maps the network's inputs to the number
            of items that its mean was taken over, a number or a scalar Tensor: valid tokens, unpadded pixels, the sum
            of weights (:class:`CountNotIgnored` and :class:`CountMask` are ready made). Gradient and loss of a window
            are then :math:`\sum_i L_i c_i / \sum_i c_i` over all micro-batches **and ranks**, whatever
            ``gradients_mean`` says; what counts 0 contributes nothing, and a window that counts 0 does not update. It
            must be finite and not negative; with data sinking, where no Python runs between steps, a bad count is not
            reported but never updates. For a network that returns a tuple of losses, one for each; ``None`` counts
            samples. Default: ``None`` , samples.
        loss_weights (Sequence[float], optional): For a network that returns a tuple of losses, the weight of each in
            their sum. Default: ``None`` , 1 for each.
        max_grad_norm (float, optional): Scale the finished, reduced gradient down to this global norm where it is
            larger, as `mindspore.ops.clip_by_global_norm` does. Default: ``None`` , no clipping.
        transforms (Sequence, optional): What the finished, reduced gradient goes through before the optimizer, once per
            update, in order: :class:`ClipByGlobalNorm` , :class:`ClipByValue` , :class:`AdaptiveGradientClip` ,
            :class:`SkipSpikes` , :class:`WeightAverage` , a :class:`Transform` of one's own, or a function that maps
            the tuple of gradients, float32 and without loss scale, to such a tuple. `max_grad_norm` comes before them.
            Default: ``()`` .
        accumulator_dtype (mindspore.dtype, optional): Dtype of the accumulators, float32, float16 or bfloat16; ``None``
            gives each the dtype of its weight. In windows of several batches, sums are scaled by the first
            batch's count; float16 overflows if a later batch counts thousands of times more.
            Default: ``mindspore.float32`` .
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
        aux (bool, optional): Whether the network returns more than its loss: a tuple (loss, \*aux), or (numerator,
            denominator, \*aux). The training step returns what is in `aux` after its own outputs; nothing of it enters
            the gradient. A Tensor whose axis 0 has the micro-batch's samples is joined over all micro-batches, in the
            batch's order; one of shape :math:`()` becomes float32, and is added up and divided as the loss is, over
            this rank's batch. The network then runs for micro-batches that count nothing too: of samples that are left
            out the outputs are there all the same. It is compiled twice: see :class:`TrainingMetrics` .
            Default: ``False`` .
        memory_limit (int, optional): With ``"auto"`` , here or of :class:`MaxTokens` , bytes that this rank may have,
            as in :func:`find_micro_batch_size` . Default: ``None`` , what there is.
        is_out_of_memory (Callable, optional): With ``"auto"`` , says of an error whether it means that memory is not
            enough. Default: ``None`` , MemoryError, and RuntimeError in the words of MindSpore's allocators.
        jit (bool, optional): In PyNative mode, compile the training step all the same. Default: ``None`` , run it
            eagerly, so that breakpoints work. Graph mode always compiles, and so does ``"auto"`` . A compiled step
            keeps to the `set_train` of each layer that it was compiled with.
        split (Union[EvenSplit, Callable], optional): How a batch becomes micro-batches. :class:`EvenSplit` : along
            axis 0, all inputs but those that it shares. A function, where micro-batches are something else than rows
            of the inputs (targets with image numbers, packed sequences, graphs, dicts): called with the batch, it
            returns a list of micro-batches, each a tuple of Tensors, the network's inputs. `micro_size` and
            `micro_batch_size` are then left out. Python calls it, and hands the micro-batches to the compiled
            micro-step one at a time; that is compiled once for each set of shapes, so that it is best to pad to a few.
            Ranks may have different numbers of micro-batches, and weigh by their samples or counts. Where `count` is
            not given, axis 0 of a micro-batch's first input says how many samples it has; a bad `count` leaves the
            whole window out. Default: ``None`` , ``EvenSplit()`` .

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs, each of shape :math:`(N, ...)`, but for those that `split`
          shares.

    Outputs:
        Tensor of shape :math:`()`, the network's loss on the inputs, not split: the cell called by itself, outside
        training, is the network.

    Raises:
        TypeError: If `network` is not a Cell, a size or `memory_limit` not an int, `max_grad_norm` not a number,
            `transforms` not a sequence of Transforms and functions, `count` or `is_out_of_memory` not callable, `split`
            neither an EvenSplit nor a function, `loss_weights` not numbers, `accumulator_dtype` not a dtype, or
            `compensated` , `shard_accumulators` , `record_noise` , `aux` or `jit` not a bool.
        ValueError: If `network` holds a cell that accumulates or trains by itself, such as MindSpore's; if both or
            neither of `micro_size` and `micro_batch_size` are given, or one with a function as `split` , which goes
            neither with several losses nor with `shard_accumulators` or a WithBatchLossCell; if one is less than 1; if
            `max_grad_norm` is not positive and finite, a loss weight not finite, `reduction` , `overflow` or
            `accumulator_dtype` not one of those above; if `count` and `loss_weights` differ in length; if
            ``overflow="drop_micro_batch"`` is given with several losses, or with a sum that has no count; if sums are
            given `loss_weights` without a count for each; if several losses are given `accumulation_steps` ; if
            `shard_accumulators` is given with several losses or ``overflow="drop_micro_batch"`` ; if `record_noise` is
            given with several losses, with a sum that has no count, or with `shard_accumulators` ; if
            ``reduction="ratio"`` is given with `count` , several losses or a WithBatchLossCell, or `aux` with one of
            the last two; if
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
        transforms: Sequence[Any] = (),
        accumulator_dtype: ms.Type | None = ms.float32,
        compensated: bool = False,
        overflow: str = "drop_window",
        shard_accumulators: bool = False,
        record_noise: bool = False,
        aux: bool = False,
        memory_limit: int | None = None,
        is_out_of_memory: Callable[[BaseException], bool] | None = None,
        jit: bool | None = None,
        split: EvenSplit | Callable | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'network' must be a Cell, but got "
                f"'{type(network).__name__}'. Wrap the network and its loss in 'nn.WithLossCell'."
            )
        refuse_accumulation_inside(network)
        options = checked(
            Options(
                micro_size=micro_size,
                micro_batch_size=micro_batch_size,
                accumulation_steps=accumulation_steps,
                reduction=reduction,
                count=count,
                loss_weights=loss_weights,
                max_grad_norm=max_grad_norm,
                transforms=transforms,
                accumulator_dtype=accumulator_dtype,
                compensated=compensated,
                overflow=overflow,
                shard_accumulators=shard_accumulators,
                record_noise=record_noise,
                aux=aux,
                memory_limit=memory_limit,
                is_out_of_memory=is_out_of_memory,
                jit=jit,
                split=split,
            )
        )
        compatibility.check(CELL, _NAME, Setup(options, network))
        self.options = dataclasses.replace(options, jit=True) if options.searches else options
        self.network = network
        self._get_attr_from_cell(network)
        self._undifferentiated = _Undifferentiated()

    def __getattr__(self, name: str) -> Any:
        """An option, or what follows from several."""
        if name in _READ:
            return getattr(self.options, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET and self.__dict__.get("_has_step", False):
            raise AttributeError(
                f"For 'GradAccumulationCell', the option '{name}' must be set before the training step is built from "
                f"the cell, which has it compiled in, but got {described(value)} afterwards. Build another cell and "
                f"step; the step's own 'set_accumulation_steps' and 'set_sense_scale' work at any time."
            )
        if name in _OPTIONS:
            name, value = "options", dataclasses.replace(self.options, **{name: value})
        super().__setattr__(name, value)

    def keep_options(self) -> None:
        """From here on, a training step has been built with them."""
        self._has_step = True

    def with_options(self, **changed: Any) -> GradAccumulationCell:
        """A cell on the same network, with some options changed."""
        return GradAccumulationCell(self.network, **vars(dataclasses.replace(self.options, **changed)))

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
