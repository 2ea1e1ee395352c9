"""GradAccumulationCell: the network with the options of accumulation. The computation is in training/step.py."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.backend.hooked_functions import install_model_hook
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.checks.arguments import described
from gaccum_ms.checks.other_names import explains_other_names
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.per_sample_loss import PerSampleLoss
from gaccum_ms.options import compatibility
from gaccum_ms.options.accumulators import Accumulators
from gaccum_ms.options.options import Options, check_each, completed
from gaccum_ms.options.rules import CELL, GIVEN, LOSS, Setup
from gaccum_ms.splitting.auto_size import AutoSize
from gaccum_ms.splitting.even_split import EvenSplit

_NAME = "GradAccumulationCell"

_OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))
_READ = frozenset(name for name in (*_OPTIONS, *vars(Options)) if not name.startswith("_"))
_WITH_LOSS = (nn.WithLossCell, WithBatchLossCell, PerSampleLoss)
# Cells that accumulate by themselves: MindSpore's in nn, parallel.nn and boost, and ours.
_ACCUMULATE = ("GradAccumulation", "GradAccumulationCell", "GradientAccumulation")


class _Undifferentiated(nn.Cell):
    """Returns its input, and refuses to be differentiated."""

    def construct(self, outputs):
        return outputs

    def bprop(self, outputs, out, dout):
        raise RuntimeError(_DIFFERENTIATED)


class GradAccumulationCell(nn.Cell):
    r"""
    Split each batch into micro-batches and update once, with the gradient of the whole batch.

    The cell holds the network and the options. `mindspore.Model` and `mindspore.amp.build_train_network` build the
    training step, :class:`TrainOneStepWithGradAccumulationCell`, from it. It has the signature of
    `mindspore.nn.GradAccumulationCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.
    GradAccumulationCell.html>`_. In addition it works stand-alone and in data parallel mode, on CPU too, reports the
    mean loss, and accepts batches that do not divide.

    Args:
        network (Cell): The network, if `mindspore.Model` gets the loss as `loss_fn` ; or the network with its loss,
            such as `nn.WithLossCell`. The loss is a scalar, shape :math:`()`: the mean over the samples of the inputs,
            unless `reduction` or `count` is given; or a tuple of such losses, with one `count` or `loss_weights` entry
            for each. Use a :class:`WithBatchLossCell` if the loss compares the samples of a batch.
        micro_size (int, optional): **Number** of micro-batches per batch. Each has
            :math:`\lceil N / \text{micro_size} \rceil` samples; the last may be smaller. Default: ``None`` .

    Keyword Args:
        micro_batch_size (Union[int, AutoSize, str], optional): Number of samples in a micro-batch, instead of
            `micro_size` ; the last may be smaller. :class:`AutoSize` , or ``"auto"`` for short: the largest size that
            fits into memory. Default: ``None`` .
        accumulation_steps (int, optional): Successive batches that share an update; the window has `micro_size` times
            as many micro-batches. Ranks are then weighted by their samples or counts, and the loss of each call is the
            batch's own mean, on this rank. Only the window's last batch reduces and updates: see
            :class:`FlushAccumulation` for the batches that remain at the end. Given alone, 1 too, each batch is one
            micro-batch. Default: ``None`` , 1.
        reduction (str, optional): How the network's loss combines its inputs: ``"mean"`` , ``"sum"`` or ``"ratio"`` . A
            sum without `count` stays a sum, over the whole batch; with `count` it is divided by the total count. With
            ``None`` it is what the loss says, such as ``nn.MSELoss(reduction="sum")`` as the `loss_fn` or in an
            `nn.WithLossCell` ; a loss that a `construct` of yours calls says nothing, and is a mean. Another than the
            loss says is an error. ``"ratio"`` : the network returns a tuple (numerator, denominator), a sum and the
            count of its items, both scalars; use it if the count is known only after the forward. The window's loss is
            then the sum of numerators over the sum of denominators, of all micro-batches and ranks. Denominators follow
            the rules of `count` below, and have no gradient. Default: ``None`` , what the loss says, else a mean.
        count (Union[Callable, Sequence], optional): A function or Cell that maps the network's inputs to the number
            of items in its mean, a number or a scalar Tensor: valid tokens, unpadded pixels, the sum of weights
            (:class:`CountNotIgnored` and :class:`CountMask` are ready made). Gradient and loss of a window are then
            :math:`\sum_i L_i c_i / \sum_i c_i` over all micro-batches **and ranks**, with either value of
            ``gradients_mean`` . A mean over no items is NaN, so a micro-batch that counts nothing is left out; a sum or
            a numerator over no items is a number, and is added. A window with total 0 does not update, unless
            `min_count` is given. (In semi-auto and auto parallel mode the whole batch of a mean over no items does not
            update.) A count must be finite and not negative; with data sinking a bad one is not reported, but never
            updates. For a network that returns a tuple of losses, give one count for each; ``None`` counts samples.
            Define a function by ``def`` : graph mode compiles no lambda within other code. Default: ``None`` , samples.
        min_count (float, optional): The least total of counts that a window is divided by, over all ranks. It is then
            divided by :math:`\max(\text{min\_count}, \sum_i c_i)` . Detection losses divide so, by the number of
            positives or 1: use ``reduction="ratio", min_count=1`` , or ``reduction="sum"`` with `count` . A window of
            total 0 then updates too. With several losses it holds for each. Default: ``None`` .
        loss_weights (Sequence[float], optional): For a network that returns a tuple of losses, the weight of each in
            their sum. Default: ``None`` , 1 for each.
        max_grad_norm (float, optional): Scale the finished, reduced gradient down to this global norm if its norm is
            larger, as `mindspore.ops.clip_by_global_norm` does; infinity only records the norm. Default: ``None`` , no
            clipping.
        transforms (Sequence, optional): Applied to the finished, reduced gradient before the optimizer, once per
            update, in order: :class:`ClipByGlobalNorm` , :class:`ClipByValue` , :class:`AdaptiveGradientClip` ,
            :class:`SkipSpikes` , :class:`WeightAverage` , your own :class:`Transform` , or a function that maps
            the tuple of gradients, float32 and without loss scale, to such a tuple. `max_grad_norm` comes before them.
            Default: ``()`` .
        accumulators (Accumulators, optional): How gradients are kept while they add up: dtype, and Kahan's
            compensation. Default: ``None`` , ``Accumulators()`` .
        overflow (str, optional): What a gradient that is not finite drops: ``"drop_window"`` or
            ``"drop_micro_batch"`` . The window: with a loss scale, it does not update. The micro-batch: it is left out,
            only on its rank, and the rest is divided by the remaining total of all ranks; ranks are then weighted by
            their samples or counts. A dynamic loss scale is reduced too. Default: ``"drop_window"`` .
        record_noise (bool, optional): Record the squared gradient norms of the window's micro-batches and of the
            window, in ``noise_sums`` and ``grad_norm`` of the step, for :class:`GradNoiseScale`
            and :class:`AdaptiveAccumulation` . Default: ``False`` .
        aux (bool, optional): Whether the network returns more than its loss: a tuple (loss, \*aux), or (numerator,
            denominator, \*aux). The training step returns `aux` after its own outputs; `aux` has no gradient. A Tensor
            with the samples on axis 0 is joined over all micro-batches, in the batch's order; one of shape :math:`()`
            becomes float32, and is added up and divided as the loss is, over this rank's batch. The network then runs
            also for micro-batches that count nothing, so that all samples have outputs. It is compiled twice: see
            :class:`TrainingMetrics` . Default: ``False`` .
        jit (bool, optional): Compile the training step in PyNative mode too, where an eager update takes 1.5 to 20
            times as long. Default: ``None`` , run it eagerly, so that breakpoints work. Graph mode always compiles,
            and so does ``"auto"`` . A compiled step keeps each layer's `set_train` at compile time.
        split (Union[EvenSplit, Callable], optional): How a batch becomes micro-batches: :class:`EvenSplit` ,
            :class:`MaxTokens` or your function. :class:`EvenSplit` cuts all inputs along axis 0, or the axis that it
            names, except those that it shares. Use a function if micro-batches are not rows of the inputs (targets with
            image numbers, packed sequences, graphs, dicts): it is called with the batch, and returns a list of
            micro-batches, each a tuple of Tensors, the network's inputs. `micro_size` and `micro_batch_size` are then
            left out. Python calls it, and runs the compiled micro-step for each micro-batch. The micro-step is compiled
            once for each set of shapes, so pad to a few shapes. Ranks may have different numbers of micro-batches, and
            are weighted by their samples or counts. Without `count` , the length of axis 0 of a micro-batch's first
            input is its number of samples; a bad `count` leaves the whole window out. Default: ``None`` ,
            ``EvenSplit()`` .
        check (str, optional): Measure the loss at the first batch, on a few samples and forward only, before anything
            is trained; ``None`` leaves it out. A loss that is not what `reduction` , `count` and `split` say of it,
            such as a sum or a root of a mean, is told by one warning, with the numbers and the remedy that makes it
            equal. It changes nothing that is trained, and reaches no other rank. ``print(step.run_record)`` says
            what was shown, or why it was left out. The environment variable ``GACCUM_MS_CHECK=none`` leaves it out
            for a whole run. Default: ``"first_batch"`` .

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs, each of shape :math:`(N, ...)`, except those that `split`
          shares.

    Outputs:
        What the network returns for the inputs, not split: outside training, calling the cell calls the network.

    Raises:
        TypeError: If `network` is not a Cell, or an option of another type than above.
        ValueError: If `network` holds a cell that accumulates or trains by itself; if an option has another value than
            above, or another `reduction` than the loss; if the loss has ``reduction="none"`` ; if both or neither of
            `micro_size` and `micro_batch_size` are given, or one with a function as `split` ; if `count` and
            `loss_weights` differ in length; if options do not go together, which ``docs/options.md`` lists, with the
            remedies.
        RuntimeError: If the cell itself is trained, by a training cell that does not accumulate, or
            differentiated, as by `mindspore.value_and_grad` .
        AttributeError: If an option or the network is assigned to the cell.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> model = ms.Model(GradAccumulationCell(net, 4), nn.MSELoss(), optimizer)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
        >>> model.train(1, data_set)
        >>> print(net.weight.asnumpy().round(4))
        [[0.4 0.4 0.4]]
    """

    has_step = False  # whether a training step was built from the cell, which forbids another network

    @explains_other_names
    def __init__(
        self,
        network: nn.Cell,
        micro_size: int | None = None,
        *,
        micro_batch_size: int | AutoSize | str | None = None,
        accumulation_steps: int | None = None,
        reduction: str | None = None,
        count: Callable | Sequence[Callable | None] | None = None,
        min_count: float | None = None,
        loss_weights: Sequence[float] | None = None,
        max_grad_norm: float | None = None,
        transforms: Sequence[Any] = (),
        accumulators: Accumulators | None = None,
        overflow: str = "drop_window",
        record_noise: bool = False,
        aux: bool = False,
        jit: bool | None = None,
        split: EvenSplit | Callable | None = None,
        check: str | None = "first_batch",
    ) -> None:
        arguments = locals()
        super().__init__(auto_prefix=False)
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'network' must be a Cell, but got "
                f"'{type(network).__name__}'. Wrap the network and its loss in 'nn.WithLossCell'."
            )
        refuse_accumulation_inside(network)
        self.network = network
        self._given_reduction = reduction
        self.options = checked_options(network, **{name: arguments[name] for name in _OPTIONS})
        self._get_attr_from_cell(network)
        self._undifferentiated = _Undifferentiated()

    def __getattr__(self, name: str) -> Any:
        """An option, or a property of the options."""
        if name in _READ:
            return getattr(self.options, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ or (name == "network" and "options" in vars(self)):
            self._refuse_change(name, value)
        super().__setattr__(name, value)

    def _refuse_change(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"For 'GradAccumulationCell', '{name}' must be given when the cell is made, because the training step has "
            f"it compiled in, but got {described(value)} afterwards. Build another cell and step; the step's own "
            f"'set_accumulation_steps' and 'set_sense_scale' work at any time."
        )

    def extend_repr(self) -> str:
        """The options that are not as by default, and the reduction, in ``print(cell)`` ."""
        plain = {**vars(completed(Options())), "micro_size": None, "reduction": ""}
        options = vars(self.options).items()
        return ", ".join(f"{name}={value!r}" for name, value in options if value != plain[name])

    def train_instead(self, network: nn.Cell, original: nn.Cell | None = None) -> None:
        """Train the network that mixed precision has made; MindSpore evaluates and predicts with the original."""
        if original is not None:
            self.__dict__.setdefault("_original_network", original)  # no child: its cells are in the other network, too
        if network is not self.network:
            if self.has_step:
                self._refuse_change("network", network)
            super().__setattr__("network", network)

    @property
    def original_network(self) -> nn.Cell:
        """The network that the cell got."""
        return self.__dict__.get("_original_network", self.network)

    def with_options(self, **changed: Any) -> GradAccumulationCell:
        """A cell on the same network, with some options changed."""
        return GradAccumulationCell(self.network, **{**self._arguments(), **changed})

    def _arguments(self) -> dict[str, Any]:
        """The options, as another cell is made with them: its loss may have another reduction."""
        return {**vars(self.options), "reduction": self._given_reduction}

    def with_loss(self, loss_fn: nn.Cell | None) -> GradAccumulationCell:
        """A cell with the same options on the network with this loss, as `nn.WithLossCell` adds it; without `loss_fn` ,
        the cell itself."""
        self.check_loss(loss_fn)
        if loss_fn is None:
            return self
        return type(self)(nn.WithLossCell(self.network, loss_fn), **self._arguments())

    def check_loss(self, loss_fn: nn.Cell | None) -> None:
        """Check that the network can have this loss: it must return none, and take the data alone."""
        if loss_fn is None:
            return
        if not isinstance(loss_fn, nn.Cell):
            raise TypeError(f"For '{_NAME}', the argument 'loss_fn' must be a Cell, but got {described(loss_fn)}.")
        if isinstance(self.network, _WITH_LOSS) or not takes(self.network, 1):
            raise ValueError(
                f"For '{_NAME}', beside 'loss_fn' the network must return no loss and take one input, the data, but "
                f"got a '{type(self.network).__name__}' and loss_fn={type(loss_fn).__name__}. Leave 'loss_fn' out if "
                f"the network returns its loss, or give the cell the network inside."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradAccumulationCell:
        """A cell without a step, on a copy of the network."""
        options = {name: copy.deepcopy(value, memo) for name, value in self._arguments().items()}
        copied = type(self)(copy.deepcopy(self.network, memo), **options)
        return copied.add_flags(training=self.training)

    def _refuse_hook(self, *hook: Any, **named: Any) -> None:
        raise RuntimeError(
            "For 'GradAccumulationCell', a hook must be registered on the network, because the training step calls the "
            "network of the cell and never the cell, but got one for the cell. Use "
            "cell.network.register_forward_hook(...), or the method of this name that you need."
        )

    register_forward_pre_hook = register_forward_hook = _refuse_hook
    register_backward_pre_hook = register_backward_hook = _refuse_hook

    def set_grad(self, requires_grad: bool = True) -> GradAccumulationCell:
        """Refuse to be trained as an ordinary network: `nn.TrainOneStepCell` makes this call."""
        if requires_grad:
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return super().set_grad(requires_grad)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.training and ms.get_context("mode") == ms.PYNATIVE_MODE:
            close_tape()
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return super().__call__(*inputs, **named)

    def construct(self, *inputs):
        if self.training:  # at compile time
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return self._undifferentiated(self.network(*inputs))


GradAccumulation = GradAccumulationCell  # the name in mindspore.parallel.nn, which MindSpore keeps
install_model_hook()


def checked_options(network: nn.Cell, **given: Any) -> Options:
    """All options of a cell, checked each and together. The loss's own `reduction` is taken if none is given."""
    options = Options(**given)
    check_each(_NAME, options)
    compatibility.check(GIVEN, _NAME, Setup(options, network))
    options = completed(options)
    setup = Setup(options, network)
    compatibility.check(LOSS, _NAME, setup)
    options = dataclasses.replace(options, reduction=setup.known_reduction)
    compatibility.check(CELL, _NAME, Setup(options, network))
    return dataclasses.replace(options, jit=True) if options.auto else options


def takes(network: nn.Cell, inputs: int) -> bool:
    """Whether a network can be called with so many inputs."""
    try:
        inspect.signature(network.construct).bind(*range(inputs))
    except TypeError:
        return False
    return True


def check_inputs(network: nn.Cell, inputs: int) -> None:
    """Refuse a batch with more or fewer inputs than the network takes, as of a network without its loss."""
    if inputs and not takes(network, inputs):
        raise TypeError(
            f"For '{_NAME}', the network must take the {inputs} input(s) of the batch and return its loss, but got a "
            f"'{type(network).__name__}' with construct{inspect.signature(network.construct)}. Give a network without "
            f"its loss a loss: ms.Model(GradAccumulationCell(net, ...), loss_fn, optimizer), or "
            f"GradAccumulationCell(nn.WithLossCell(net, loss_fn), ...)."
        )


def cell_with_loss(
    owner: str, cell: Any, loss_fn: nn.Cell | None, name: str = "cell", others: str = ""
) -> GradAccumulationCell:
    """The cell with this loss, if there is one; anything but a cell of ours is refused. `name` , `others` : in the
    error, the argument, and what else it may be."""
    if not isinstance(cell, GradAccumulationCell):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a gaccum_ms.GradAccumulationCell{others}, but got "
            f"'{type(cell).__name__}'."
        )
    whole = cell.with_loss(loss_fn)
    for each in (whole, cell):  # the cell shows the reduction that it has with this loss
        each.options = dataclasses.replace(each.options, reduction=whole.reduction or "mean")
    return whole


def refuse_accumulation_inside(network: nn.Cell) -> None:
    """Refuse a network that contains a cell that accumulates or trains."""
    for name, cell in held_cells(network):
        if isinstance(cell, nn.TrainOneStepCell) or any(kind.__name__ in _ACCUMULATE for kind in type(cell).__mro__):
            where = f"'{name}' in it" if name else "the network"
            raise ValueError(
                f"For 'GradAccumulationCell', the argument 'network' must return a loss and neither accumulate nor "
                f"train by itself, but {where} is a '{type(cell).__module__}.{type(cell).__name__}'. Give the network "
                f"that it wraps."
            )


# A functional gradient accumulates nothing either.
_DIFFERENTIATED = (
    "For 'GradAccumulationCell', the cell must not be differentiated, but a functional gradient of it is being taken, "
    "as by mindspore.value_and_grad(cell, ...). Nothing would be accumulated, counted or clipped. In a loop of your "
    "own, differentiate the network that you gave the cell, and hand the gradients to gaccum_ms.GradAccumulator; or "
    "call gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer)."
)

# The step calls the inner network, never the cell. A call of the cell would train without accumulating, or not at all
# (`ms.Model` without an optimizer). A constant, because graph mode must be able to raise it.
_TRAINED_WITHOUT_STEP = (
    "For 'GradAccumulationCell', training must go through ms.Model(cell, loss_fn, optimizer), "
    "mindspore.amp.build_train_network(cell, optimizer) or "
    "gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer), with the cell outermost and an optimizer, and "
    "'gaccum_ms.GradAccumulationCell' imported before build_train_network is; but the cell itself is being trained. As "
    "it is used here, no gradient would be accumulated."
)
