"""UpdateScheduler: steps MindSpore's schedulers of experimental optimizers once per update of `ms.Model.train` ."""

from __future__ import annotations

from typing import Any

from mindspore.train import RunContext

from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.schedulers import Schedulers
from gaccum_ms.training.step_in_model import training_step

_NAME = "UpdateScheduler"


class UpdateScheduler(WindowCallback):
    r"""
    Call ``step()`` of schedulers once per update, and not once per batch.

    It is for the optimizers of `mindspore.experimental.optim` and `mindspore.mint.optim` , whose rates are changed by
    the schedulers of `mindspore.experimental.optim.lr_scheduler
    <https://www.mindspore.cn/docs/en/master/api_python/mindspore.experimental.html#lrscheduler-class>`_ . A batch that
    does not end its window changes no rate, nor does a window that overflowed. If a scheduler counts epochs, call its
    ``step()`` in your own callback.

    With a :class:`ShardedOptimizer` , create the schedulers for its ``inner`` optimizer.

    Rates and the schedulers' state are in checkpoints. Create this callback, with the same schedulers, before you call
    :func:`resume` , which then restores them.

    Args:
        *schedulers (LRScheduler): Schedulers of the training's optimizer, stepped in this order.

    Raises:
        TypeError: If there is none, or one is no LRScheduler; ReduceLROnPlateau is none, because it needs a metric.
        ValueError: If the schedulers are for different optimizers, or for another than the training's, or for
            `mindspore.mint.optim.SGD` , which never reads a changed rate; if a scheduler keeps state outside of
            Parameters, which checkpoints would lose.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from mindspore.experimental import optim
        >>> from gaccum_ms import GradAccumulationCell, UpdateScheduler
        >>> net = nn.Dense(3, 1)
        >>> optimizer = optim.Adam(net.trainable_params(), lr=0.1)
        >>> scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=4)
        >>> x, y = np.ones((16, 3), np.float32), np.zeros((16, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> ms.Model(cell, optimizer=optimizer).train(1, data_set, callbacks=[UpdateScheduler(scheduler)])
        >>> print(scheduler.get_last_lr()[0])  # 8 batches, 2 updates
        0.025
    """

    def __init__(self, *schedulers: Any) -> None:
        super().__init__()
        self.schedulers = Schedulers(_NAME, "schedulers", schedulers)

    def on_train_begin(self, run_context: RunContext) -> None:
        step: Any = training_step(run_context)
        self.schedulers.check_optimizer(step.optimizer, "a GradAccumulationCell is trained with")
        step.schedulers = self.schedulers  # which checkpoints of the step have, also when this callback is gone
        # A checkpoint may be from between an update and its schedulers.
        self.schedulers.follow(int(step.update_count.asnumpy()))

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        self.schedulers.follow(record.update)
