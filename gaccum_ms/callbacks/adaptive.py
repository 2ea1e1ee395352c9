"""AdaptiveAccumulation: the gradient noise decides how many batches share an update."""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspore.train import RunContext

from gaccum_ms.callbacks.noise_scale import check_noise_is_recorded, noise_estimate
from gaccum_ms.callbacks.schedule import AccumulationScheduler
from gaccum_ms.checks.arguments import check_finite, check_positive_finite, check_positive_int
from gaccum_ms.distributed.layout import gather_json
from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.record.noise_estimate import WindowNoise
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.step_in_model import training_step

_NAME = "AdaptiveAccumulation"
_LARGEST_CHANGE = 2.0


class StepsRecord(NamedTuple):
    """A change: the fields are explained at `AdaptiveAccumulation` ."""

    update: int
    accumulation_steps: int
    learning_rate: float
    noise_scale: float
    batch_size: float


class AdaptiveAccumulation(AccumulationScheduler):
    r"""
    Adapt `accumulation_steps` to the gradient noise scale, and the learning rate to `accumulation_steps` .

    The noise scale is about the critical batch size (McCandlish et al., `An Empirical Model of Large-Batch Training
    <https://arxiv.org/abs/1812.06162>`_ , 2018). It grows while the loss falls, and so does the largest efficient
    batch. It is estimated as by :class:`GradNoiseScale` , for which the cell needs ``record_noise=True`` . After
    every `interval` -th update, the batch of an update is compared with `target` times the noise scale. If it is more
    than `tolerance` times too small or too large, later windows get another number of batches, at most twice or half
    as many and between `min_steps` and `max_steps` . Smaller deviations, such as noise of the estimate, change nothing.
    All ranks use rank 0's number. Nothing is compiled anew.

    A window of one micro-batch shows no noise. If a batch is one micro-batch, on all ranks, windows have at least two
    batches.

    ``records`` has a named tuple for each change: ``update`` , the number of updates made;
    ``accumulation_steps`` and ``learning_rate`` (of the first parameter group), from the next window on;
    ``noise_scale`` and ``batch_size`` at that time, in items. Checkpoints of the step hold the rate and the number, and
    a resumed step continues with them; averages begin anew.

    Args:
        target (float): The batch of an update as a part of the noise scale, positive. At 1, training takes about twice
            the least number of updates and twice the least number of examples. Default: ``1.0`` .
        min_steps (int): Fewest batches of a window. Default: ``1`` .
        max_steps (int): Most batches of a window. Default: ``16`` .
        learning_rate (str, optional): How the learning rate changes with `accumulation_steps` , ``"linear"`` or
            ``"sqrt"`` , as in :func:`scale_learning_rate` : the optimizer's own rate is the rate for the cell's own
            `accumulation_steps` . ``None`` : it stays. Default: ``"linear"`` .
        tolerance (float): A batch is changed if it is this many times too small or too large; larger than 1.
            Default: ``1.5`` .
        interval (int): Number of updates between two comparisons. Default: ``20`` .
        smoothing (float): The part of the two moving averages that each update keeps, at least 0, below 1.
            Default: ``0.99`` .

    Raises:
        TypeError: If an argument is not a number, or `min_steps` , `max_steps` or `interval` not an int.
        ValueError: If `target` is not positive and finite, `tolerance` not finite and larger than 1, `smoothing` not at
            least 0 and below 1, an int less than 1, `max_steps` less than `min_steps` , or `learning_rate` another
            word; if training begins without ``record_noise`` , with data sinking, with an optimizer whose rate
            cannot be changed, or with ranks that have different numbers of batches.
        RuntimeError: If training begins with a step that was compiled for windows of one batch.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import AdaptiveAccumulation, GradAccumulationCell
        >>> random = np.random.default_rng(0)
        >>> x = np.ones((2048, 1), np.float32)
        >>> y = 8 * random.normal(size=(2048, 100)).astype(np.float32)  # gradient (w - y) / 50
        >>> net = nn.Dense(1, 100, weight_init="ones", has_bias=False)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=1e-6)  # w stays 1: noise scale 8^2 / 1^2 = 64
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, record_noise=True)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(16)
        >>> adaptive = AdaptiveAccumulation(max_steps=2, smoothing=0.999)
        >>> ms.Model(cell, optimizer=optimizer).train(2, data_set, callbacks=[adaptive])
        >>> print([record.accumulation_steps for record in adaptive.records])
        [2]
    """

    every_window = True

    def __init__(
        self,
        target: float = 1.0,
        min_steps: int = 1,
        max_steps: int = 16,
        learning_rate: str | None = "linear",
        tolerance: float = 1.5,
        interval: int = 20,
        smoothing: float = 0.99,
    ) -> None:
        super().__init__(lambda updates: self._next_steps, learning_rate)
        check_positive_finite(_NAME, "target", target)
        for name, value in (("min_steps", min_steps), ("max_steps", max_steps), ("interval", interval)):
            check_positive_int(_NAME, name, value)
        if max_steps < min_steps:
            raise ValueError(
                f"For '{_NAME}', the argument 'max_steps' must not be less than 'min_steps', but got {max_steps} and "
                f"{min_steps}."
            )
        check_finite(_NAME, "tolerance", tolerance)
        if tolerance <= 1:
            raise ValueError(f"For '{_NAME}', the argument 'tolerance' must be larger than 1, but got {tolerance}.")
        self.target = target
        self.min_steps, self.max_steps = min_steps, max_steps
        self.tolerance = tolerance
        self.interval = interval
        self._estimate = noise_estimate(_NAME, smoothing)
        self.records: list[StepsRecord] = []

    def on_train_begin(self, run_context: RunContext) -> None:
        check_noise_is_recorded(_NAME, run_context)
        super().on_train_begin(run_context)
        step: Any = training_step(run_context)
        # In a resumed step, both may differ from the cell's.
        present = step.accumulation_steps if self.learning_rate is None else step.rate_steps
        self._next_steps = int(present.asnumpy())

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        if record.noise is None:
            return
        self._estimate.add(record.noise)
        if record.update % self.interval:
            return
        step: Any = training_step(run_context)
        steps = int(step.accumulation_steps.asnumpy())
        wanted = int(self._wanted(record.noise, steps, record.batches))
        # Rank 0's: the last digit of a norm may differ between ranks, but the number of batches must not.
        self._next_steps = gather_json(wanted)[0] if step.reducer_flag else wanted
        if self._next_steps == steps:
            return
        self._follow(run_context)
        rate = current_learning_rate(step.optimizer)
        self.records.append(
            StepsRecord(record.update, self._next_steps, rate, self._estimate.noise_scale, record.noise.items)
        )

    def _wanted(self, noise: WindowNoise, steps: int, batches: int) -> int:
        """The number of batches for later windows, after a window of `batches` batches."""
        batch_items = noise.items / max(batches, 1)  # the last window of an epoch may have fewer batches than `steps`
        least = self.min_steps
        if noise.micro_batches < 1.5 * max(batches, 1):  # a batch is one micro-batch, on all ranks
            least = max(least, 2)
        ratio = self.target * self._estimate.noise_scale / (steps * batch_items)
        wanted = steps
        if ratio > self.tolerance:
            wanted = max(round(steps * min(ratio, _LARGEST_CHANGE)), steps + 1)
        elif ratio < 1 / self.tolerance:
            wanted = min(round(steps * max(ratio, 1 / _LARGEST_CHANGE)), steps - 1)
        return min(max(wanted, least), self.max_steps)
