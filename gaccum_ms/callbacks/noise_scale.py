"""GradNoiseScale derives a batch size from the gradient noise."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mindspore.train import RunContext

from gaccum_ms.checks.arguments import check_number
from gaccum_ms.distributed.ranks import rank_or_0
from gaccum_ms.record.noise_estimate import SMOOTHING, NoiseEstimate
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.step_in_model import training_step

_NAME = "GradNoiseScale"
_NEAR = 1.5  # the largest ratio, in either direction, that counts as near the critical size


def noise_estimate(owner: str, smoothing: Any) -> NoiseEstimate:
    check_number(owner, "smoothing", smoothing)
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"For '{owner}', the argument 'smoothing' must be at least 0 and below 1, but got {smoothing}."
        )
    return NoiseEstimate(smoothing)


def check_noise_is_recorded(owner: str, run_context: RunContext) -> None:
    if not hasattr(training_step(run_context), "noise_sums"):
        raise ValueError(
            f"For '{owner}', the GradAccumulationCell must have record_noise=True, but got record_noise=False."
        )


class ScaleRecord(NamedTuple):
    """The estimate after an update: the fields are explained at `GradNoiseScale` ."""

    update: int
    batch_size: float
    noise_scale: float


class GradNoiseScale(WindowCallback):
    r"""
    Estimate the gradient noise scale during training, and derive advice on the batch size.

    The noise scale :math:`\mathrm{tr} \Sigma / |G|^2` , with :math:`G` the true gradient and :math:`\Sigma` the
    covariance of one item's gradient, is about the critical batch size (McCandlish et al., `An Empirical Model of
    Large-Batch Training <https://arxiv.org/abs/1812.06162>`_ , 2018). Much smaller batches are mostly noise: doubling
    the batch is worth nearly two updates. Much larger batches gain little. Both terms are estimated, without bias, from
    the squared norms of the gradients of each window and of its micro-batches, over all ranks, and averaged over
    updates. `batch` means all items of an update: samples, or the items of `count` . If ranks have equal
    weight but unequal batches, it is the batch size that would be equally noisy.

    The cell needs ``record_noise=True`` , and windows of at least two micro-batches, over all ranks. After training,
    rank 0 prints `advice` . Reading the records waits for the device, after each batch.

    During and after training, the callback has

    * ``noise_scale`` : the estimate, in items; NaN before the first window, infinite if the gradient cannot be
      distinguished from zero;
    * ``advice`` : what to do, in one line; "accumulate over 6" means ``accumulation_steps=6`` ;
    * ``records`` : for each update a named tuple of ``update`` , ``batch_size`` and ``noise_scale`` .

    Args:
        smoothing (float): The part of the two moving averages that each update keeps, at least 0, below 1. The averages
            cover about the last 1 / (1 - `smoothing` ) updates. Default: ``0.99`` .

    Raises:
        TypeError: If `smoothing` is not a number.
        ValueError: If `smoothing` is not at least 0 and below 1; if training begins without ``record_noise`` , or with
            data sinking, which hides batches from callbacks.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, GradNoiseScale
        >>> random = np.random.default_rng(0)
        >>> x = np.ones((2048, 1), np.float32)
        >>> y = random.normal(size=(2048, 100)).astype(np.float32)  # gradient (w - y) / 50
        >>> net = nn.Dense(1, 100, weight_init="ones", has_bias=False)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.0)  # w stays 1: noise scale 1^2 / 1^2
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, record_noise=True)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(16)
        >>> noise = GradNoiseScale(smoothing=0.999)
        >>> ms.Model(cell, optimizer=optimizer).train(1, data_set, callbacks=[noise])
        batch 16 is 16 times above the critical size 1: a smaller one learns nearly as much from each update
        >>> print(0.9 < noise.noise_scale < 1.1)
        True
    """

    every_window = True

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        super().__init__()
        self._estimate = noise_estimate(_NAME, smoothing)
        self.records: list[ScaleRecord] = []

    @property
    def noise_scale(self) -> float:
        return self._estimate.noise_scale

    @property
    def advice(self) -> str:
        scale = self.noise_scale
        if math.isnan(scale):
            return "the gradient noise is not known: no window of at least two micro-batches has updated"
        batch = self.records[-1].batch_size
        if math.isinf(scale):
            return f"batch {_as_text(batch)} is mostly noise: the gradient cannot be told from zero, larger batches can"
        if scale == 0:
            return (
                f"batch {_as_text(batch)} has no noise that can be told: a smaller one learns as much from each update"
            )
        ratio, critical = scale / batch, f"the critical size {_as_text(scale, 2)}"
        if ratio > _NEAR:
            steps = max(round(ratio * self._batches), self._batches + 1)
            return f"batch {_as_text(batch)} is {_times(ratio)} below {critical}: accumulate over {steps:,}"
        if ratio < 1 / _NEAR:
            return (
                f"batch {_as_text(batch)} is {_times(1 / ratio)} above {critical}: a smaller one learns nearly as much "
                f"from each update"
            )
        return f"batch {_as_text(batch)} is near {critical}: keep it"

    def on_train_begin(self, run_context: RunContext) -> None:
        check_noise_is_recorded(_NAME, run_context)

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        if record.noise is not None:
            self._estimate.add(record.noise)
            self.records.append(ScaleRecord(record.update, record.noise.items, self.noise_scale))
            self._batches = record.batches

    def on_train_end(self, run_context: RunContext) -> None:
        if rank_or_0() == 0:
            print(self.advice)


def _as_text(items: float, digits: int = 6) -> str:
    """For example "1,600" and "0.4"."""
    rounded = float(f"{items:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 3 else f"{ratio:.1f} times"
