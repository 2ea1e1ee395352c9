"""WindowRecord: what is known of a window that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from gaccum_ms.record.noise_estimate import WindowNoise


@dataclass(frozen=True)
class WindowRecord:
    """
    The record of a window that has ended, for a :class:`WindowCallback` and of :meth:`GradAccumulator.record` .

    Args:
        update (int): Updates made so far.
        updated (bool): Whether this window made one. It made none if it overflowed, was skipped or counted nothing.
        epoch (Union[int, None]): The epoch in which the window ended, from 1; ``None`` in a loop of your own that does
            not say it.
        batches (int): The number of its batches, on this rank.
        losses (tuple[float]): Each batch's mean, for the batches of this training: on this rank, or in semi-auto and
            auto parallel mode on all devices.
        loss (float): The window's mean, with `count` over all ranks; so too of a GradAccumulator, and NaN if it was
            given no losses.
        counts (tuple[float]): Each batch's samples, or its `count` , on this rank. With several losses, one entry for
            each loss. 1 for a batch of a GradAccumulator that has neither.
        count (Union[float, None]): The total of the window's mean, over all ranks if ranks are weighted by counts;
            ``None`` with several losses, which have no common total.
        loss_terms (Union[tuple[float], None]): With several losses, the mean of each, before `loss_weights` ;
            otherwise ``None`` .
        dropped_micro_batches (int): Micro-batches that were left out, on all ranks.
        grad_norm (Union[float, None]): The global norm before clipping; ``None`` without `max_grad_norm` and
            `record_noise` . With :class:`SkipSpikes` alone, it is the norm that was judged.
        noise_scale (Union[float, None]): In items, the estimate of :class:`GradNoiseScale` with its default
            `smoothing` , from all windows of this step; ``None`` without `record_noise` .
        loss_scale (Union[float, None]): The loss scale; ``None`` without one.
        learning_rate (float): The update's rate, of the first parameter group.
        seconds (float): Time from the beginning of the first batch to the end of the update. In a loop of your own,
            time since the window before it ended.
        counted (str): What `counts` and `count` count: ``"samples"`` ; ``"items"`` , those of the option `count` or of
            ``reduction="ratio"`` ; or ``"batches"`` of a GradAccumulator that knows neither. Default: ``"samples"`` .
        skipped_updates (int): Updates that :class:`SkipSpikes` has skipped so far; 0 without it. Default: ``0`` .
        noise (Union[WindowNoise, None]): The squared norms of the gradients of the window and of its micro-batches, and
            their items, as a named tuple; ``None`` without `record_noise` and without an update.
            Default: ``None`` .

    Raises:
        FrozenInstanceError: If a field is assigned.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, WindowMonitor
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=2)
        >>> x, y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> monitor = WindowMonitor()
        >>> ms.Model(cell, optimizer=nn.SGD(net.trainable_params(), 0.1)).train(1, data_set, callbacks=[monitor])
        >>> (record,) = monitor.records
        >>> print(record.update, record.updated, record.batches, record.losses, record.loss, record.count)
        1 True 2 (9.0, 9.0) 9.0 4.0
    """

    update: int
    updated: bool
    epoch: int | None
    batches: int
    losses: tuple[float, ...]
    loss: float
    counts: tuple[float, ...]
    count: float | None
    loss_terms: tuple[float, ...] | None
    dropped_micro_batches: int
    grad_norm: float | None
    noise_scale: float | None
    loss_scale: float | None
    learning_rate: float
    seconds: float
    counted: str = "samples"
    skipped_updates: int = 0
    noise: WindowNoise | None = None

    def scalars(self) -> dict[str, float]:
        """Its single numbers by their fields' names, but `update` , which is their step; terms of the loss are
        ``loss_terms/<n>`` . Logging services take them as they are."""
        terms = {f"loss_terms/{number}": loss for number, loss in enumerate(self.loss_terms or ())}
        return {
            name: float(value)
            for name, value in vars(self).items()
            if isinstance(value, (bool, int, float)) and name != "update"
        } | terms
