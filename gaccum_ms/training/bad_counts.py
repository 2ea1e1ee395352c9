"""After a batch: one clear error for a bad count, and one warning about a window that counted nothing.

The graph does not update with a bad count, on any rank. It cannot raise the error, which names the counts.
"""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.training.components import Components
from gaccum_ms.training.runner import Batch

_NAME = "GradAccumulationCell"


class NoCount:
    """The warning, said once, about a window that counted nothing on any rank, and so made no update."""

    def __init__(self, min_count: float | None) -> None:
        self._is_due = min_count is None

    def warn(self, owner: str, window_count: ms.Parameter, dropped: ms.Parameter | None) -> None:
        """Warn if the window that has just ended counted nothing, and not because its micro-batches were dropped."""
        if self._is_due and not window_count.asnumpy().any() and not (dropped is not None and dropped.asnumpy().any()):
            self._is_due = False
            warn_user(
                f"For '{owner}', a window counted nothing on any rank, and made no update. If the loss of such a "
                f"window has a meaning, as a detection loss has without any object, give min_count=1, with "
                f"reduction='ratio', or 'sum' and counts: the total is then at least 1. This is said once."
            )


class Counts:
    """The counts of a step's last batch and window, where micro-batches are weighted by counts."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._no_count = NoCount(components.options.min_count)

    def check(self, batch: Batch) -> None:
        """Raise an error for a bad count in the batch, or in its window on any rank."""
        components, options = self._components, self._components.options
        spans_batches, by_python = components.spans_batches, options.splits_in_python
        ended = not spans_batches or components.is_between_windows
        of_window = ended and (not spans_batches or by_python)
        window_count = components.window.window_count
        total = (window_count if of_window else components.window.open.batch_items).asnumpy()
        if (total == total).all():
            if ended:
                dropped = getattr(components.window, "dropped_micro_batches", None)  # several losses drop none
                self._no_count.warn(_NAME, window_count, dropped)
            return
        if options.returns_ratio:
            raise ValueError(
                f"For '{_NAME}', with reduction='ratio' the network must return a denominator that is a finite number "
                f"of items and not negative, but got one that is negative, infinite or NaN for a micro-batch of this "
                f"rank or, where this rank's are fine, of another. {_consequence(spans_batches, True)}: correct the "
                f"network and go on."
            )
        micro_batches = batch.micro_batches()
        counted = [[float(count(*part)) for part in micro_batches] for count in options.counts if count is not None]
        others = "" if spans_batches else "Where these are fine, another rank's are not. "
        was_added = spans_batches and components.window.adds_bad_batches
        if by_python:
            others, was_added = "Where these are fine, another rank's or batch's of the window are not. ", True
        raise ValueError(
            f"For '{_NAME}', 'count' must return a finite number of items that is not negative, but got {counted} for "
            f"the micro-batches of this rank. {others}{_consequence(spans_batches, was_added)}: correct 'count' and go "
            f"on."
        )


def _consequence(spans_batches: bool, was_added: bool) -> str:
    """The consequence of a bad count. `was_added` : part of its batch was already in the accumulators."""
    if not spans_batches:
        return "Nothing was changed"
    return "The window that the batch is in does not update" if was_added else "The batch is left out of its window"
