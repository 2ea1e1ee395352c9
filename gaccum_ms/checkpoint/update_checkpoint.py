"""UpdateCheckpoint: checkpoints by update, where MindSpore's `ModelCheckpoint` counts batches."""

from __future__ import annotations

from typing import Any

from mindspore.train import CheckpointConfig, ModelCheckpoint, RunContext

from gaccum_ms.backend.checkpoint_file import with_checksum
from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord
from gaccum_ms.training.step_in_model import training_step


class UpdateCheckpoint(WindowCallback, ModelCheckpoint):
    r"""
    Save a checkpoint after every `updates` updates, at a window's end, and when training ends.

    Otherwise it is a `mindspore.train.ModelCheckpoint <https://www.mindspore.cn/docs/en/master/api_python/train/
    mindspore.train.ModelCheckpoint.html>`_ , called only at these times. `ModelCheckpoint` itself counts batches, and
    also saves in the middle of a window. :func:`resume` accepts the checkpoints of both. Those of this class have
    MindSpore's checksum ( `crc_check` ), by which `resume` finds a damaged file; an encrypted one has none.

    Args:
        updates (int): Updates between two checkpoints.
        **kwargs (Any): `prefix` , `directory` and `config` of `ModelCheckpoint` . `config` counts batches and seconds:
            its `save_checkpoint_steps` must stay 1.

    Raises:
        TypeError: If `updates` is not an int.
        ValueError: If `updates` is less than 1, or `config` has another `save_checkpoint_steps` than 1; if training
            begins without our step.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, UpdateCheckpoint
        >>> net = nn.Dense(3, 1)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=3)
        >>> x, y = np.ones((18, 3), np.float32), np.zeros((18, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> folder = tempfile.mkdtemp()
        >>> ms.Model(cell, optimizer=optimizer).train(
        ...     1, data_set, callbacks=[UpdateCheckpoint(1, prefix="net", directory=folder)]
        ... )
        >>> print(sorted(file.name for file in Path(folder).glob("*.ckpt")))
        ['net-1_3.ckpt', 'net-1_6.ckpt', 'net-1_9.ckpt']
    """

    def __init__(self, updates: int = 1, **kwargs: Any) -> None:
        check_positive_int("UpdateCheckpoint", "updates", updates)
        super().__init__(**kwargs)
        self._config: CheckpointConfig = with_checksum(self._config)
        if self._config.save_checkpoint_steps != 1:
            raise ValueError(
                f"For 'UpdateCheckpoint', 'save_checkpoint_steps' of 'config' must be 1, because updates are counted, "
                f"but got {self._config.save_checkpoint_steps}. Give the number of updates as 'updates'."
            )
        self.updates = updates

    def begin(self, run_context: RunContext) -> None:
        step: Any = training_step(run_context)
        self._saved_update = self._last_update = int(step.update_count.asnumpy())

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        self._last_update = record.update

    def step_end(self, run_context: RunContext) -> None:
        # Not at the window's end: other callbacks may then still change the rate, which the checkpoint holds.
        if self._last_update >= self._saved_update + self.updates:
            self._saved_update = self._last_update
            super().step_end(run_context)
