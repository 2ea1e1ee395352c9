"""End to end: a language model trains the same whole and in micro-batches; on two ranks, see test_counted_ranks.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import language_model
from tests.support.language_model import IGNORED, UPDATES
from tests.support.reference import relative_error

TOLERANCE = 1e-5
pytestmark = pytest.mark.thorough


def labels_in_each(update: int, micro_size: int) -> list[bool]:
    _, labels = language_model.batch(update)
    return [bool((part != IGNORED).any()) for part in np.split(labels, micro_size)]


def test_micro_batches_train_as_the_whole_batch():
    """It learns, and some micro-batches have no labels: otherwise equality would show little."""
    losses, weights = language_model.train(language_model.accumulated(4))
    whole_losses, whole_weights = language_model.whole_batch()
    np.testing.assert_allclose(losses, whole_losses, rtol=TOLERANCE)
    assert relative_error(weights, whole_weights) < TOLERANCE
    assert whole_losses[-1] < 0.9 * whole_losses[0]
    assert sum(not all(labels_in_each(update, micro_size=4)) for update in range(UPDATES)) >= 5


def test_mean_of_means_is_caught(pynative):
    """The control weighs by samples. Both halves of its batch have labels, so that nothing is NaN."""
    assert all(labels_in_each(0, micro_size=2))
    with pytest.warns(UserWarning, match="Give the cell count=gaccum_ms.CountNotIgnored"):
        losses, _ = language_model.train(language_model.accumulated(2, count=None), updates=1)
    assert relative_error(losses, language_model.whole_batch()[0][:1]) > 1e-2
