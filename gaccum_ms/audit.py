r"""audit: does accumulation give this network the whole batch's update? Measured on one batch, and nothing is kept.

What is compared is the finished gradient, not only the updated parameters: an optimizer such as Adam divides by the
gradient's own size, so that its update looks right with a gradient that is K times too large.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms import compatibility
from gaccum_ms.accumulation import accumulators, clip, micro_batches
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.compatibility import AUDIT, Setup
from gaccum_ms.layers.batchnorm import batch_norm_names
from gaccum_ms.layers.dropout import dropouts
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_NARROW = (ms.float16, ms.bfloat16)
_SEED = 1

# A gradient that is zero but for rounding, as a bias' before a normalisation, has no relative error of its own: errors
# are relative to at least this share of the largest gradient entry of all.
_SMALLEST_SCALE = 1e-2


@dataclass(frozen=True)
class AuditReport:
    """What :func:`audit` found; ``print(report)`` shows it as a table.

    All errors are the largest absolute difference between the accumulated and the whole batch's values of one
    parameter, relative to the latter's largest entry, without unit. A NaN says that a value was not finite.
    """

    gradients: dict[str, float]  # parameter name -> error of its finished gradient, before clipping
    parameters: dict[str, float]  # parameter name -> error of its value after one update with the optimizer
    loss_whole: float
    loss_accumulated: float
    loss_behaves_as: str  # "mean", "sum" or "neither"; "batch" where the network says that it needs the whole batch
    reduction: str  # what the cell says it is
    batch_norm_layers: tuple[str, ...]
    couples_samples: bool  # whether, beside a wrong reduction=, results depend on which samples share a micro-batch
    dropout_layers: tuple[str, ...]  # switched off for the audit
    problems: tuple[str, ...]  # what is wrong and what to do, one sentence or two each

    @property
    def ok(self) -> bool:
        """Whether accumulation gives this network what the whole batch would."""
        return not self.problems

    def _behaviour(self) -> str:
        if self.loss_behaves_as == "batch":
            return "one of the whole batch, as WithBatchLossCell says"
        return f"{self.loss_behaves_as}, the cell has reduction='{self.reduction}'"

    def __str__(self) -> str:
        error = _relative_error(self.loss_accumulated, self.loss_whole)
        losses = f"{self.loss_whole:.6g} on the whole batch, {self.loss_accumulated:.6g} accumulated ({error:.1e})"
        facts = {
            "loss": losses,
            "loss behaves as": self._behaviour(),
            "couples samples": "yes" if self.couples_samples else "no",
            "BatchNorm layers": ", ".join(self.batch_norm_layers) or "none",
            "dropout, switched off": ", ".join(self.dropout_layers) or "none",
        }
        width = max(len(name) for name in (*facts, *self.gradients))
        lines = [f"{name:{width}}  {fact}" for name, fact in facts.items()]
        lines.append(f"{'worst relative error':{width}}  gradient  after update")
        for name in self.gradients:
            lines.append(f"{name:{width}}  {self.gradients[name]:8.1e}  {self.parameters[name]:12.1e}")
        lines.append(f"{'verdict':{width}}  {'ok' if self.ok else f'{len(self.problems)} problem(s)'}")
        return "\n".join([*lines, *(f"* {problem}" for problem in self.problems)])


def audit(
    cell: GradAccumulationCell, optimizer: nn.Optimizer, *batch: ms.Tensor, tolerance: float | None = None
) -> AuditReport:
    r"""
    Check on one batch that accumulation gives a network the whole batch's update, before hours are spent on it.

    One update runs with the cell's options and one on the whole batch, from the same values; the latter is
    `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepCell.html>`_,
    or, where counts or several losses decide, this project's step with one micro-batch. Compared are the finished
    gradient (before `max_grad_norm` , which would hide a wrong size), the updated parameters (which judge nothing: Adam
    hides a wrong size, and makes much of a gradient that is zero but for rounding) and the loss. Whether the loss is a
    mean or a sum is probed: on the batch twice over a mean stays, a sum doubles.

    Afterwards parameters, optimizer state, buffers, whatever else the network's `construct` writes into its attributes,
    and the cells' flags are what they were, bit for bit; compiled steps go on from there. The network runs in training
    mode. Dropout layers are switched off, because the masks of micro-batches cannot equal the whole batch's, and
    MindSpore's default generator has a fixed seed, restored afterwards. The batch goes forward and backward whole, and
    forward twice over: use one that fits into memory.

    Args:
        cell (GradAccumulationCell): The network with its loss and the options of accumulation.
        optimizer (Optimizer): The optimizer that is to train it.
        *batch (Tensor): The inputs of one batch, each of shape :math:`(N, ...)`, of at least two micro-batches.

    Keyword Args:
        tolerance (float, optional): The largest relative error that passes for rounding, without unit.
            Default: ``None`` , 1e-4, or 2e-2 where weights, accumulators or `to_float` are float16 or bfloat16.

    Returns:
        AuditReport, a dataclass that prints as a table. ``ok`` is True if nothing was found; ``problems`` says what
        was, and what to do: a loss that is a sum where `reduction` says mean, or the reverse; BatchNorm layers; a
        network that couples samples although no known layer does, such as a contrastive loss with in-batch negatives,
        or whose mean is over something that `count` does not count; a loss that is random without a dropout layer.
        The other fields, ``gradients`` , ``parameters`` , ``loss_whole`` , ``loss_accumulated`` ,
        ``loss_behaves_as`` , ``reduction`` , ``batch_norm_layers`` , ``couples_samples`` , ``dropout_layers`` , are
        what the table shows.

    Raises:
        TypeError: If `cell` is not a GradAccumulationCell, `optimizer` not an Optimizer, or an input not a Tensor.
        ValueError: If the batch would not be split, its inputs differ in length, or the cell's training step refuses
            it; if `tolerance` is not positive.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, audit
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> x, y = Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> print(audit(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4), optimizer, x, y))
        loss                   9 on the whole batch, 9 accumulated (0.0e+00)
        loss behaves as        mean, the cell has reduction='mean'
        couples samples        no
        BatchNorm layers       none
        dropout, switched off  none
        worst relative error   gradient  after update
        weight                  0.0e+00       0.0e+00
        bias                    0.0e+00       0.0e+00
        verdict                ok
        >>> report = audit(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss("sum")), 4), optimizer, x, y)
        >>> print(report.loss_behaves_as, report.loss_whole, report.loss_accumulated)
        sum 72.0 18.0
    """
    _check(cell, optimizer, batch, tolerance)
    recorder = _Recorder(optimizer, cell.max_grad_norm)
    before = Snapshot(cell, recorder)
    try:
        with warnings.catch_warnings():  # the report says it
            warnings.filterwarnings("ignore", message="For 'GradAccumulationCell', the network has .* BatchNorm")
            accumulated_step = TrainOneStepWithGradAccumulationCell(_unclipped(cell), recorder).set_train()
            whole_step = _whole_batch_step(cell, recorder).set_train()
        losses = _Losses(cell.network).set_train()
        dropout_layers = _switch_dropout_off(cell.network)
        accumulated = _run(accumulated_step, recorder, batch)
        before.restore_values()
        whole = _run(whole_step, recorder, batch)
        before.restore_values()
        once, again = losses.on(batch), losses.on(batch)
        twice = losses.on([ops.concat((value, value)) for value in batch])
    finally:
        before.restore()

    tolerance = tolerance or _rounding(cell, recorder.parameters)
    names = [weight.name for weight in recorder.parameters]
    largest = max(np.abs(gradient).max(initial=0) for gradient in whole.gradients)
    gradients = {
        name: _relative_error(value, reference, _SMALLEST_SCALE * largest)
        for name, value, reference in zip(names, accumulated.gradients, whole.gradients, strict=True)
    }
    parameters = {
        name: _relative_error(value, reference)
        for name, value, reference in zip(names, accumulated.parameters, whole.parameters, strict=True)
    }
    errors = {**gradients, "the loss": _relative_error(accumulated.loss, whole.loss)}
    worst = max(errors, key=lambda name: errors[name])
    of_batch = isinstance(cell.network, WithBatchLossCell)
    behaves_as = "batch" if of_batch else _behaves_as(once, twice, tolerance, cell.reduction)
    batch_norm_layers = tuple(batch_norm_names(cell.network))

    problems = []
    couples_samples = bool(batch_norm_layers)
    if batch_norm_layers:
        problems.append(
            f"{len(batch_norm_layers)} BatchNorm layer(s) couple the samples of a micro-batch: "
            f"{', '.join(batch_norm_layers)}. For the whole batch's results use nn.GroupNorm or nn.LayerNorm, or "
            f"use_batch_statistics=False."
        )
    # From here on the first that is found explains what comes after it.
    if not np.isfinite([whole.loss, accumulated.loss, *errors.values()]).all():
        problems.append(
            f"A loss or gradient is not finite; the loss is {whole.loss:.6g} on the whole batch, "
            f"{accumulated.loss:.6g} accumulated. Nothing can be compared: use other weights or inputs. Where only the "
            f"accumulated one is not finite, a micro-batch takes a mean over nothing, such as ignored labels alone: "
            f"give it as count=."
        )
    elif largest == 0:
        problems.append("All gradients are zero: nothing can be compared. Use a batch from which the network learns.")
    elif not np.allclose(once, again, rtol=tolerance, atol=0):
        problems.append(
            f"The loss differs from one call to the next, {_shown(once)} and {_shown(again)}: something other than a "
            f"dropout layer is random or keeps a state, and errors may come from it. Switch it off for the audit."
        )
    elif of_batch:
        if errors[worst] > tolerance and not batch_norm_layers:
            couples_samples = True
            problems.append(
                f"Micro-batching changes the result, by {errors[worst]:.1e} in {worst}, although the loss sees the "
                f"whole batch: the backbone gives a sample another representation among other samples, or another one "
                f"the second time. Leave to 'loss_fn' what compares samples."
            )
    elif behaves_as not in (cell.reduction, "neither"):
        problems.append(
            f"The loss behaves as a {behaves_as} over samples, but the cell has reduction='{cell.reduction}': loss and "
            f"gradient have a wrong size. Give reduction='{behaves_as}', or make the loss a {cell.reduction}."
        )
    elif behaves_as == "neither":
        couples_samples = True
        problems.append(
            f"The loss is neither a mean nor a sum over samples: {_shown(once)} on the batch, {_shown(twice)} on the "
            f"batch twice over. Either it compares samples of one batch, as in-batch negatives do, and needs a "
            f"WithBatchLossCell, or them in one micro-batch; or it adds a term of its own to a sum: make it a mean."
        )
    elif errors[worst] > tolerance and not batch_norm_layers:
        couples_samples = True
        problems.append(
            f"Micro-batching changes the result, by {errors[worst]:.1e} in {worst}, although no known layer couples "
            f"samples. Either the network compares samples of one batch: give it as WithBatchLossCell; or its "
            f"loss is a mean over something other than {'what count= counts' if cell.counted else 'samples'}, such as "
            f"valid tokens: give it as count=."
        )
    return AuditReport(
        gradients=gradients,
        parameters=parameters,
        loss_whole=whole.loss,
        loss_accumulated=accumulated.loss,
        loss_behaves_as=behaves_as,
        reduction=cell.reduction,
        batch_norm_layers=batch_norm_layers,
        couples_samples=couples_samples,
        dropout_layers=dropout_layers,
        problems=tuple(problems),
    )


def _check(cell: GradAccumulationCell, optimizer: nn.Optimizer, batch: tuple, tolerance: float | None) -> None:
    if not isinstance(cell, GradAccumulationCell):
        raise TypeError(
            f"For 'audit', the argument 'cell' must be a gaccum_ms.GradAccumulationCell, but got "
            f"'{type(cell).__name__}'."
        )
    if not isinstance(optimizer, nn.Cell) or getattr(optimizer, "parameters", None) is None:
        raise TypeError(
            f"For 'audit', the argument 'optimizer' must be an nn.Optimizer, but got '{type(optimizer).__name__}'."
        )
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"For 'audit', the argument 'tolerance' must be positive, but got {tolerance!r}.")
    compatibility.check(AUDIT, "audit", Setup(cell.options, cell.network))
    plan = micro_batches.plan_split(micro_batches.batch_shapes(batch), cell.micro_size, cell.micro_batch_size)
    if plan.samples == plan.size:
        raise ValueError(
            f"For 'audit', the argument 'batch' must be split into at least two micro-batches, but got a batch of "
            f"{plan.samples} sample(s) with micro_size={cell.micro_size} and micro_batch_size={cell.micro_batch_size}: "
            f"there is nothing to compare. Use a larger batch or a larger 'micro_size'."
        )


class _Recorder(nn.Cell):
    """The optimizer, behind a record of the gradient that reaches it. It clips in the step's place: clipped first, a
    gradient of a wrong size would look right."""

    def __init__(self, optimizer: nn.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.parameters = optimizer.parameters
        self.max_grad_norm = max_grad_norm
        self.gradients = accumulators.allocate(self.parameters, ms.float32, "audit_gradients.")
        self.map = ops.HyperMap()

    def construct(self, gradients):
        gradients = ops.depend(gradients, self.map(accumulators.add_to, self.gradients, gradients))
        if self.max_grad_norm is not None:
            gradients = clip.clip_by_norm(gradients, clip.global_norm(gradients), self.max_grad_norm)
        return self.optimizer(gradients)


class _Losses(nn.Cell):
    """The network, forward only. A cell of our own, so that the network keeps no graph that the audit compiled."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)

    def on(self, batch: Sequence[ms.Tensor]) -> np.ndarray:
        losses = self(*batch)
        return np.array([as_numpy(loss) for loss in (losses if isinstance(losses, tuple) else (losses,))])


@dataclass(frozen=True)
class _Update:
    """What one update leaves."""

    loss: float
    gradients: list[np.ndarray]
    parameters: list[np.ndarray]


def _run(step: nn.Cell, recorder: _Recorder, batch: tuple[ms.Tensor, ...]) -> _Update:
    ms.manual_seed(_SEED)
    loss = step(*batch)
    return _Update(
        float(as_numpy(loss[0] if isinstance(loss, tuple) else loss)),
        [as_numpy(gradient) for gradient in recorder.gradients],
        [as_numpy(parameter) for parameter in recorder.parameters],
    )


def _unclipped(cell: GradAccumulationCell, **size: Any) -> GradAccumulationCell:
    """A cell with these options on the same network, for one batch, that leaves clipping to the recorder. Of several
    ranks all must audit, so that accumulators may be sharded as they will be in training."""
    return cell.with_options(accumulation_steps=1, max_grad_norm=None, record_noise=False, **size)


def _whole_batch_step(cell: GradAccumulationCell, recorder: _Recorder) -> nn.Cell:
    """MindSpore's own step where it knows the rule, so that our step is not measured by itself."""
    gathers = isinstance(cell.network, WithBatchLossCell) and cell.network.ranks > 1
    if cell.own_count is not None or cell.several_losses or gathers:
        return TrainOneStepWithGradAccumulationCell(_unclipped(cell, micro_size=1, micro_batch_size=None), recorder)
    return nn.TrainOneStepCell(cell.network, recorder)


def _switch_dropout_off(network: nn.Cell) -> tuple[str, ...]:
    layers = dropouts(network)
    for layer in layers.values():
        layer.add_flags(training=False)
    return tuple(layers)


def _rounding(cell: GradAccumulationCell, weights: Sequence[ms.Parameter]) -> float:
    dtypes = [cell.accumulator_dtype, *(weight.dtype for weight in weights)]
    flags = [layer.get_flags() for _, layer in cell.cells_and_names()]
    narrow = any(dtype in _NARROW for dtype in dtypes) or any(one.get("fp16") or one.get("bf16") for one in flags)
    return 2e-2 if narrow else 1e-4


def _behaves_as(once: np.ndarray, twice: np.ndarray, tolerance: float, expected: str) -> str:
    """What the losses on the batch and on the batch twice over say; `expected` where they say both, a loss of zero."""
    values = {"mean": once, "sum": 2 * once}
    for kind in (expected, "mean", "sum"):
        if np.allclose(twice, values[kind], rtol=tolerance, atol=0):
            return kind
    return "neither"


def _relative_error(value: np.ndarray | float, reference: np.ndarray | float, smallest_scale: float = 0.0) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    scale = max(np.abs(reference).max(initial=0), smallest_scale, 1e-30)
    return float(np.abs(value - reference).max(initial=0) / scale)


def _shown(losses: np.ndarray) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses)
