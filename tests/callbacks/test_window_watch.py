"""The windows that end within a rank's epoch, by which ranks with different numbers of batches are evened out."""

from __future__ import annotations

import pytest

from gaccum_ms.callbacks.window_watch import RankBatches


@pytest.mark.parametrize(
    ("rank", "first", "later"),
    [
        (RankBatches(7, 0, 0, 1), (1, 3), (1, 3)),
        (RankBatches(7, 0, 2, 3), (2, 2), (1, 3)),  # one batch ends the open window
        (RankBatches(7, 0, 3, 3), (2, 2), (1, 3)),  # a full window ends with the next batch
        (RankBatches(7, 0, 1, 9), (0, 8), (1, 3)),
        (RankBatches(7, 5, 0, 1), (0, 2), (1, 3)),
        (RankBatches(8, 2, 1, 3), (2, 0), (2, 0)),
    ],
)
def test_windows_of_a_rank(rank, first, later):
    """In windows of four batches, the ended ones and the batches left: in the first epoch, and in later ones."""
    assert (rank.windows(4, True), rank.windows(4, False)) == (first, later)
