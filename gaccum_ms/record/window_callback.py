"""WindowCallback: the base of callbacks that act once for each window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspore import nn
from mindspore.train import Callback, RunContext

from gaccum_ms.backend.hooked_functions import install_model_hook
from gaccum_ms.record.window_record import WindowRecord


class WindowCallback(Callback):
    """
    Base of callbacks that act once for each window, where MindSpore's act for each batch.

    `Model.train` and `Model.fit` call ``on_window_end(run_context, record)`` of all such callbacks, in their order, as
    soon as a window has ended: after the batch that completed it, before any callback's ``on_train_step_end`` ; or
    after a flush, by :class:`FlushAccumulation` or by the step's ``flush()`` . Windows that made no update are
    included. `record` is a :class:`WindowRecord` .

    A derived class may override all methods of `mindspore.train.Callback <https://www.mindspore.cn/docs/en/master/
    api_python/train/mindspore.train.Callback.html>`_ and need not call them, because this class overrides none. It may
    also derive from another callback.

    With data sinking, MindSpore calls callbacks once for each sink. ``on_window_end`` is then called once for a sink in
    which windows have ended, with the record of the last one, whose ``losses`` and ``counts`` are empty. A class that
    needs each window sets ``every_window = True`` , which refuses data sinking.

    Args:
        None.

    Raises:
        ValueError: If training begins without our step, or, for a class with ``every_window = True`` , with data
            sinking.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, WindowCallback
        >>> class PrintLoss(WindowCallback):
        ...     def on_window_end(self, run_context, record):
        ...         print(f"update {record.update}: loss {record.loss:.2f}")
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=2)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1)).train(1, data_set, callbacks=[PrintLoss()])
        update 1: loss 9.00
        update 2: loss 0.36
    """

    every_window = False

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        """Called after each window."""


install_model_hook()  # calls on_window_end, or refuse_other_networks


def refuse_other_networks(callbacks: Iterable[Any], network: nn.Cell) -> None:
    """Raise a ValueError if one is a `WindowCallback` : `network` , which has no step of ours, has no windows."""
    for callback in callbacks:
        if isinstance(callback, WindowCallback):
            raise ValueError(
                f"For '{type(callback).__name__}', the trained network must be a GradAccumulationCell, but got "
                f"'{type(network).__name__}'."
            )
