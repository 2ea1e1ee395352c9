"""AdaScale: scales the learning rate by the measured gain of a larger batch, during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
from mindspore.train import RunContext

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.callbacks.noise_scale import NoiseCallback, check_smoothing
from gaccum_ms.checks.arguments import check_positive_finite
from gaccum_ms.learning_rate import multiply_learning_rate
from gaccum_ms.record.noise_estimate import WindowNoise
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.step_in_model import training_step

_NAME = "AdaScale"


class GainRecord(NamedTuple):
    """The gain after an update: the fields are explained at `AdaScale` ."""

    update: int
    gain: float
    progress: float


class AdaScale(NoiseCallback):
    r"""
    Multiply the learning rate by AdaScale's gain, between 1 and the number of micro-batches of an update.

    It is for a rate that was tuned for one micro-batch. The linear rule multiplies it by the number :math:`S` of
    micro-batches, which is too much if their gradients agree. AdaScale (Johnson et al., `AdaScale SGD
    <https://arxiv.org/abs/2007.05105>`_ , 2020) multiplies it by

    .. math::
        r = \frac{\sigma^2 + \mu^2}{\sigma^2 / S + \mu^2} \in [1, S]

    with :math:`\mu^2` the true gradient's squared norm and :math:`\sigma^2` the variance of a micro-batch's gradient.
    The gain is :math:`S` if the gradients are only noise, and 1 if there is no noise. Both are estimated as by
    :class:`GradNoiseScale` , from the gradients of the window and of its first micro-batch, over all ranks, and
    averaged over updates. :math:`S` is the window's items divided by those of its first micro-batch. An update makes
    :math:`r` scale-invariant steps: as much progress as :math:`r` updates on one micro-batch. `schedule` and `steps`
    count these, so they need no change when the number of micro-batches changes.

    An update's gain is estimated from the updates before it, because callbacks run after the optimizer; the first gain
    is 1. The cell needs ``record_noise=True`` , and the optimizer's rate must be a number, a list or a schedule of
    :func:`scale_learning_rate` . All groups of parameters have one gain. The step's checkpoints hold the present factor
    of the rate, and the progress; averages begin anew. Reading the records waits for the device, after each batch.

    The callback has ``gain`` , the next update's gain; ``progress`` , the scale-invariant steps so far; and
    ``records`` , for each update a named tuple of ``update`` , ``gain`` (the next update's) and ``progress`` .

    Args:
        schedule (Callable, optional): Maps scale-invariant steps, an int rounded down, to a positive factor of the
            optimizer's rate, as ``lambda steps: 0.1 ** (steps // 1000)`` . Default: ``None`` , 1.
        steps (float, optional): Scale-invariant steps after which training stops, positive. Default: ``None`` , it
            stops after its epochs.
        smoothing (float, optional): The part of the moving averages that each update keeps, at least 0, below 1.
            Default: ``None`` , the paper's :math:`\max(1 - S / 1000, 0)` .

    Raises:
        TypeError: If `schedule` is not callable, or `steps` or `smoothing` not a number.
        ValueError: If `steps` is not positive and finite, or `smoothing` not at least 0 and below 1; if training begins
            without ``record_noise`` , with data sinking, or with a schedule of MindSpore; if `schedule` does not return
            a positive number.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import AdaScale, GradAccumulationCell
        >>> net = nn.Dense(1, 1, weight_init="ones", has_bias=False)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.01)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, record_noise=True)
        >>> x, y = np.ones((64, 1), np.float32), np.zeros((64, 1), np.float32)  # all samples agree
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
        >>> scale = AdaScale()
        >>> ms.Model(cell, optimizer=optimizer).train(1, data_set, callbacks=[scale])
        >>> print(round(scale.gain, 3), round(scale.progress, 3))
        1.0 8.0
    """

    def __init__(
        self,
        schedule: Callable[[int], float] | None = None,
        steps: float | None = None,
        smoothing: float | None = None,
    ) -> None:
        super().__init__()
        if schedule is not None and not callable(schedule):
            raise TypeError(f"For '{_NAME}', the argument 'schedule' must be callable, but got {schedule!r}.")
        if steps is not None:
            check_positive_finite(_NAME, "steps", steps)
        if smoothing is not None:
            check_smoothing(_NAME, smoothing)
        self.schedule = schedule
        self.steps = steps
        self.smoothing = smoothing
        self.gain = 1.0
        self.progress = 0.0
        self.records: list[GainRecord] = []

    def on_train_begin(self, run_context: RunContext) -> None:
        super().on_train_begin(run_context)
        step: Any = training_step(run_context)
        self.progress = float(step.rate_progress.asnumpy())
        self.gain = float(step.rate_factor.asnumpy()) / self._factor() if self.progress else 1.0
        self._set_rate(step)

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        noise = record.noise
        if noise is None:
            return
        self.progress += self.gain
        if noise.is_known:
            paper = max(1 - noise.items / noise.first_items / 1000, 0.0)
            self.estimate.add(noise, paper if self.smoothing is None else self.smoothing)
        self.gain = self._gain(noise)
        self._set_rate(training_step(run_context))
        self.records.append(GainRecord(record.update, self.gain, self.progress))
        if self.steps is not None and self.progress >= self.steps:
            run_context.request_stop()

    def _gain(self, noise: WindowNoise) -> float:
        """The gain for windows of this size."""
        variance = max(self.estimate.variance.value, 0.0)
        square = max(self.estimate.true_square_norm.value, 0.0)
        if not noise.first_items > 0 or not variance + square > 0:  # NaN before there is any
            return 1.0
        return (variance / noise.first_items + square) / (variance / noise.items + square)

    def _factor(self) -> float:
        if self.schedule is None:
            return 1.0
        factor = self.schedule(int(self.progress))
        check_positive_finite(_NAME, "schedule", factor)
        return float(factor)

    def _set_rate(self, step: Any) -> None:
        factor = self.gain * self._factor()
        multiply_learning_rate(step.optimizer, factor / float(step.rate_factor.asnumpy()))
        overwrite(step.rate_factor, ms.Tensor(factor, ms.float32))
        overwrite(step.rate_progress, ms.Tensor(self.progress, ms.float32))
