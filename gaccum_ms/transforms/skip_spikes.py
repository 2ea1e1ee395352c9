"""Skipping updates whose gradient is far larger than usual."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.checks.arguments import check_positive_finite, check_positive_int
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.transforms.norms import global_norm
from gaccum_ms.transforms.transform import Transform

_NAME = "SkipSpikes"


class SkipSpikes(Transform):
    r"""
    Skip an update if the gradient's norm is above `factor` times its running median, or above a fixed norm.

    A batch of bad data or a numerical accident then has no effect: weights, optimizer, learning rate and count of
    updates stay as they are, and training continues with the next window. PaLM's training avoided its loss spikes by
    skipping batches after a restart (Chowdhery et al., `PaLM <https://arxiv.org/abs/2204.02311>`_ , 2022, section 5.1);
    this link skips them as they come.

    The norm is taken of the gradient at this link: put the link before those that clip. The median is over the last
    `history` norms, including skipped windows, so that a gradient that stays large is accepted after half of `history`
    windows. A window whose norm is not finite is skipped, and does not enter the median. All ranks use the mean of
    their norms, so that they decide alike.

    The step gets two Parameters: ``skipped_updates`` , int32 of shape :math:`()` , the number of skipped updates so
    far, and ``judged_norm`` , float32 of shape :math:`()` , the last norm. :class:`WindowMonitor` records both.
    Checkpoints have them and the norms, and :func:`resume` continues with them.

    Args:
        factor (float, optional): The largest ratio of a norm to the median. Default: ``None`` , no such limit.

    Keyword Args:
        norm (float, optional): The largest norm. Default: ``None`` , no such limit.
        history (int): The number of norms in the median. Default: ``128`` .
        warmup_updates (int): The number of windows before the median is used. Default: ``16`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The finished gradients, float32.

    Outputs:
        tuple[Tensor], the gradients as they came.

    Raises:
        TypeError: If a limit is not a number, or `history` or `warmup_updates` not an int.
        ValueError: If neither limit is given, `factor` is not more than 1, `norm` not positive and finite, or an int
            less than 1; when the step is built, if it comes behind a :class:`ClipByGlobalNorm` or `max_grad_norm` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, SkipSpikes, TrainOneStepWithGradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, transforms=(SkipSpikes(norm=50.0),))
        >>> step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.1)).set_train()
        >>> x, y = Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> for size in (1, 1000, 1):
        ...     loss = step(x * size, y)
        >>> print(step.update_count.asnumpy(), step.skipped_updates.asnumpy())
        2 1
    """

    def __init__(
        self,
        factor: float | None = None,
        *,
        norm: float | None = None,
        history: int = 128,
        warmup_updates: int = 16,
    ) -> None:
        super().__init__()
        if factor is None and norm is None:
            raise ValueError(
                f"For '{_NAME}', at least one of 'factor' (times the median) and 'norm' must be given, but got "
                f"neither: nothing would be left out."
            )
        if norm is not None:
            check_positive_finite(_NAME, "norm", norm)
        if factor is not None:
            check_positive_finite(_NAME, "factor", factor)
            if not factor > 1:
                raise ValueError(
                    f"For '{_NAME}', the argument 'factor' must be more than 1, because half of all norms are above "
                    f"their median, but got {factor}."
                )
        check_positive_int(_NAME, "history", history)
        check_positive_int(_NAME, "warmup_updates", warmup_updates)
        self.has_factor = factor is not None
        self.factor = float(factor or 0.0)
        self.norm = float("inf") if norm is None else float(norm)
        self.history, self.warmup_updates = history, warmup_updates

    def prepare(self, network: nn.Cell | None) -> None:
        # Unused places are infinite, so that sorting puts them last.
        self.judged_norms = self.state("judged_norms", np.full(self.history, np.inf, np.float32))
        self.judged_updates = self.state("judged_updates", np.zeros((), np.int32))  # norms that were entered
        self.judged_norm = self.state("judged_norm", np.zeros((), np.float32))
        self.skipped_updates = self.state("skipped_updates", np.zeros((), np.int32))
        self.places = ms.Tensor(np.arange(self.history), ms.int32)
        _, self.ranks = rank_and_ranks()
        self.over_ranks: Any = ops.AllReduce() if self.ranks > 1 else None

    def begin_anew(self) -> None:
        overwrite(self.judged_norms, ops.full_like(self.judged_norms, float("inf")))
        for parameter in (self.judged_updates, self.judged_norm, self.skipped_updates):
            overwrite(parameter, ops.zeros_like(parameter))

    # -- compiled ------------------------------------------------------------------------------------------------------

    def allows(self, gradients):
        norm = global_norm(gradients)
        if self.ranks > 1:  # processors of different kinds may round differently, and no rank may update alone
            norm = self.over_ranks(norm.reshape((1,))).reshape(()) / self.ranks
        finite = ops.isfinite(norm)
        allowed = ops.logical_and(finite, norm <= self.largest())
        entered = self.judged_updates + 0
        here = ops.logical_and(self.places == entered % self.history, finite)
        recorded = ops.assign(self.judged_norms, ops.depend(ops.select(here, norm, self.judged_norms + 0.0), allowed))
        recorded = ops.assign(self.judged_updates, ops.depend(entered + ops.cast(finite, ms.int32), recorded))
        recorded = ops.depend(recorded, ops.assign(self.judged_norm, norm))
        skipped = ops.cast(ops.logical_not(allowed), ms.int32)
        return ops.depend(allowed, (recorded, ops.assign_add(self.skipped_updates, skipped)))

    def largest(self):
        """The largest norm that is no spike."""
        fixed = ms.Tensor(self.norm, ms.float32)
        if not self.has_factor:
            return fixed
        entered = self.judged_updates + 0
        last = ops.minimum(entered, ms.Tensor(self.history, ms.int32)) - 1
        ordered = ops.sort(self.judged_norms + 0.0)[0]
        # The middle norm, or the mean of the middle two.
        middle = ops.maximum(ops.stack((last // 2, (last + 1) // 2)), ms.Tensor(0, ms.int32))
        median = ops.reduce_mean(ops.gather(ordered, middle, 0))
        known = ops.logical_and(entered >= self.warmup_updates, median > 0)
        no_limit = ms.Tensor(float("inf"), ms.float32)
        return ops.minimum(fixed, ops.select(known, median * self.factor, no_limit))
