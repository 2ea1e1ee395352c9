"""PerSampleLoss by itself. In semi-auto parallel mode: semi_auto/test_batch_sums.py."""

from __future__ import annotations

import pytest
from mindspore import Tensor, nn

from gaccum_ms import PerSampleLoss


def test_per_sample_losses_become_their_mean_or_their_sum(pynative):
    losses = Tensor([[1.0, 2.0], [3.0, 6.0]])
    assert float(PerSampleLoss(nn.Identity())(losses)) == 3.0
    assert float(PerSampleLoss(nn.Identity(), "sum")(losses)) == 12.0


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="'network' must be a Cell, but got 'function'"):
        PerSampleLoss(lambda x: x)
    with pytest.raises(ValueError, match=r"'reduction' must be one of \['mean', 'sum'\], but got 'none'"):
        PerSampleLoss(nn.Identity(), "none")
