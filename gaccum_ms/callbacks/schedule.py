"""Changes how many batches share an update, by epoch or by the number of updates made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
from mindspore.train import RunContext

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.checks.arguments import check_not_negative_int, check_one_of, check_positive_int
from gaccum_ms.learning_rate import RULES, multiply_learning_rate, scaling_factor
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.training.step_in_model import training_step


class AccumulationScheduler(WindowCallback):
    r"""
    Change `accumulation_steps` during training: small batches first, large ones when the gradient is noisy.

    Smith et al. describe growing the batch instead of reducing the learning rate: "Don't Decay the Learning Rate,
    Increase the Batch Size" (2018, `arXiv:1711.00489 <https://arxiv.org/abs/1711.00489>`_). The number changes between
    windows only, and nothing is compiled anew.

    Args:
        schedule (Union[dict[int, int], Callable]): A dict from epochs, counted from 0, to the number of batches that
            share an update from then on: ``{0: 1, 5: 4}`` ; before the first entry, the cell's own number applies. Or a
            function that maps the number of updates made, an int, to the next window's number.
        learning_rate (str, optional): How the learning rate changes with `accumulation_steps` , ``"linear"`` or
            ``"sqrt"`` , as in :func:`scale_learning_rate` : the optimizer's own rate is the rate for the cell's own
            `accumulation_steps` . Default: ``None`` , it stays.

    Raises:
        TypeError: If `schedule` is neither dict nor function, or if one of its numbers is not an int.
        ValueError: If it is an empty dict, or a number of batches is less than 1, or an epoch negative; if
            `learning_rate` is another word, or the optimizer's rate cannot be changed; if ranks have
            different numbers of batches and `schedule` is a function.
        RuntimeError: If training begins with a step that was compiled for windows of one batch.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import AccumulationScheduler, GradAccumulationCell
        >>> net = nn.Dense(3, 1)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> model = ms.Model(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2), optimizer=optimizer)
        >>> x, y = np.ones((16, 3), np.float32), np.zeros((16, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> model.train(2, data_set, callbacks=[AccumulationScheduler({0: 1, 1: 4})])
        >>> print(model.train_network.update_count.asnumpy())  # 8, and 2 in the second epoch
        10
    """

    def __init__(self, schedule: Mapping[int, int] | Callable[[int], int], learning_rate: str | None = None) -> None:
        super().__init__()
        if isinstance(schedule, Mapping):
            schedule = dict(schedule)
            if not schedule:
                raise ValueError("For 'AccumulationScheduler', the argument 'schedule' must not be empty.")
            for epoch, steps in schedule.items():
                check_not_negative_int("AccumulationScheduler", "epoch of schedule", epoch)
                check_positive_int("AccumulationScheduler", f"schedule[{epoch!r}]", steps)
        elif not callable(schedule):
            raise TypeError(
                f"For 'AccumulationScheduler', the argument 'schedule' must be a dict from epochs to numbers of "
                f"batches, or a function of the number of updates, but got {schedule!r}."
            )
        if learning_rate is not None:
            check_one_of(type(self).__name__, "learning_rate", learning_rate, tuple(RULES))
        self.schedule = schedule
        self.learning_rate = learning_rate

    def on_train_begin(self, run_context: RunContext) -> None:
        """Check that `accumulation_steps` and the rate can be changed, so that an error comes before training."""
        step: Any = training_step(run_context)
        if isinstance(self.schedule, Mapping):
            step.let_windows_span_batches(max(2, *self.schedule.values()))
        else:
            step.let_windows_span_batches()
        if self.learning_rate is not None:
            multiply_learning_rate(step.optimizer, 1.0)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        ranks = run_context.original_args().get("rank_batches") or []
        if callable(self.schedule) and len(set(ranks)) > 1:
            raise ValueError(
                f"For '{type(self).__name__}', all ranks must have the same number of batches, or the argument "
                f"'schedule' of AccumulationScheduler must be a dict of epochs, because ranks cannot agree on the "
                f"windows of an epoch otherwise, but got a function of the updates and "
                f"{[rank.batches - rank.skipped for rank in ranks]} batches."
            )
        self._follow(run_context)

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        self._follow(run_context)

    def _follow(self, run_context: RunContext) -> None:
        """Between two windows: set the number of batches of later windows, and the learning rate by its rule."""
        step: Any = training_step(run_context)
        if int(step.window_position.asnumpy()):
            return
        steps = self._steps(step, run_context.original_args().cur_epoch_num - 1)
        check_positive_int(type(self).__name__, "schedule", steps)
        if steps != int(step.accumulation_steps.asnumpy()):
            step.set_accumulation_steps(steps)
        # Compared with `rate_steps` , not with the old steps: a checkpoint's rate may be for another number.
        rate_steps = int(step.rate_steps.asnumpy())
        if self.learning_rate is not None and steps != rate_steps:
            multiply_learning_rate(step.optimizer, scaling_factor(steps / rate_steps, self.learning_rate))
            overwrite(step.rate_steps, ms.Tensor(steps, ms.int32))

    def _steps(self, step: TrainOneStepWithGradAccumulationCell, epoch: int) -> Any:
        if callable(self.schedule):
            return self.schedule(int(step.update_count.asnumpy()))
        begun = [first for first in self.schedule if first <= epoch]
        # Not the step's present number, which may be from an earlier training.
        return self.schedule[max(begun)] if begun else step.run_record.own_steps
