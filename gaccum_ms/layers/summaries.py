"""Summary operators in a network, which record a value for each batch: under accumulation, only one micro-batch's."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from gaccum_ms.backend.code_of_cells import functions_of
from gaccum_ms.backend.held_cells import held_cells, held_values

_SUMMARIES = (ops.ScalarSummary, ops.TensorSummary, ops.HistogramSummary, ops.ImageSummary)


def advice_about_summaries(network: nn.Cell) -> str | None:
    """What to say about a network that records summaries; None if none does as far as its code shows."""
    names = [name or type(cell).__name__ for name, cell in held_cells(network) if _records(cell)]
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', the network records summaries ({', '.join(names)}), and of a batch only the last "
        f"micro-batch's is kept. Return the value with aux=True, and record what the training step returns: "
        f"gaccum_ms.TrainingMetrics and gaccum_ms.WindowMonitor do."
    )


def _records(cell: nn.Cell) -> bool:
    if any(_is_summary(value) for _, value in held_values(cell)):
        return True
    if type(cell).__module__.startswith("mindspore."):
        return False
    return any(_is_summary(value) for _, values in functions_of(cell) for value in values)


def _is_summary(value: Any) -> bool:
    return issubclass(value, _SUMMARIES) if isinstance(value, type) else isinstance(value, _SUMMARIES)
