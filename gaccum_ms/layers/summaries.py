"""Summary operators in a network, which record a value for each batch: under accumulation, only one micro-batch's."""

from __future__ import annotations

from mindspore import nn, ops

from gaccum_ms.backend.code_of_cells import uses
from gaccum_ms.backend.held_cells import held_cells

_SUMMARIES = (ops.ScalarSummary, ops.TensorSummary, ops.HistogramSummary, ops.ImageSummary)


def advice_about_summaries(network: nn.Cell) -> str | None:
    """What to say about a network that records summaries; None if none does as far as its code shows."""
    names = [name or type(cell).__name__ for name, cell in held_cells(network) if uses(cell, _SUMMARIES)]
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', the network records summaries ({', '.join(names)}), and of a batch only the last "
        f"micro-batch's is kept. Return the value with aux=True, and record what the training step returns: "
        f"gaccum_ms.TrainingMetrics and gaccum_ms.WindowMonitor do."
    )
