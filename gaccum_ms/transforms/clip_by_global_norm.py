"""Clipping by global norm as a link of the chain; at the front it equals `max_grad_norm` ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaccum_ms.checks.arguments import check_positive_finite
from gaccum_ms.transforms.norms import clip_by_norm, global_norm
from gaccum_ms.transforms.transform import Transform

if TYPE_CHECKING:
    from gaccum_ms.transforms.skip_spikes import SkipSpikes


class ClipByGlobalNorm(Transform):
    r"""
    Scale all gradients down to a global norm if theirs is larger; `max_grad_norm` is the short form for the front of
    `transforms` .

    If :math:`n` is the Euclidean norm of all gradients together, each gradient is multiplied by
    :math:`\min(1, \text{max\_norm} / n)` , as in `mindspore.ops.clip_by_global_norm
    <https://www.mindspore.cn/docs/en/master/api_python/ops/mindspore.ops.clip_by_global_norm.html>`_ (Pascanu, Mikolov
    and Bengio, `On the difficulty of training recurrent neural networks <https://arxiv.org/abs/1211.5063>`_ , 2013).

    Args:
        max_norm (float): The largest norm.

    Inputs:
        - **gradients** (tuple[Tensor]) - The finished gradients, float32.

    Outputs:
        tuple[Tensor], the gradients, clipped.

    Raises:
        TypeError: If `max_norm` is not a number.
        ValueError: If it is not positive and finite.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from gaccum_ms import ClipByGlobalNorm
        >>> (clipped,) = ClipByGlobalNorm(1.0)((Tensor([3.0, 4.0]),))
        >>> print(clipped)
        [0.6 0.8]
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        check_positive_finite("ClipByGlobalNorm", "max_norm", max_norm)
        self.max_norm = float(max_norm)
        self.has_judge = False

    def take_norm_of(self, judge: SkipSpikes) -> None:
        """Clip by the norm that this link has taken of the same gradients."""
        self.has_judge = True
        self.judge = judge

    # -- compiled ------------------------------------------------------------------------------------------------------

    def change(self, gradients):
        norm = self.judge.judged_norm + 0.0 if self.has_judge else global_norm(gradients)
        return clip_by_norm(gradients, norm, self.max_norm)
