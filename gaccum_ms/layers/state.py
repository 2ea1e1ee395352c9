"""State that `construct` writes, such as a running centre, a codebook or an EMA teacher: finding the layers.

Under accumulation `construct` runs once per micro-batch, so such state moves several times per update, and sees one
micro-batch at a time.
"""

from __future__ import annotations

from mindspore import nn, ops

from gaccum_ms.backend.code_of_cells import written_by
from gaccum_ms.backend.held_cells import held_cells, held_values
from gaccum_ms.checks.arguments import first_of

_SCATTERS = (f"scatter_{kind}{name}" for kind in ("", "nd_") for name in ("add", "sub", "mul", "div", "max", "min"))
_NAMES = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_nd_update", *_SCATTERS)
# Not all versions have all of them.
_FUNCTIONS = tuple(getattr(ops, name) for name in _NAMES if hasattr(ops, name))
_CLASSES = ("".join(word.capitalize() for word in name.split("_")) for name in _NAMES)
_PRIMITIVES = tuple(getattr(ops, name) for name in _CLASSES if hasattr(ops, name))
_OTHERS = ("mindspore.", "gaccum_ms.")  # BatchNorm has a warning of its own, and WindowBatchNorm adds up


def advice_about_state(network: nn.Cell) -> str | None:
    """What to say about a network that writes state in `construct` ; None if none does as far as its code shows."""
    written = [
        f"{where} of '{name or type(cell).__name__}'" for name, cell in held_cells(network) for where in _written(cell)
    ]
    if not written:
        return None
    return (
        f"For 'GradAccumulationCell', the network writes state in 'construct' ({first_of(written)}), which runs once "
        f"per micro-batch: the state moves several times per update, and not as with the whole batch. Write it once "
        f"per update: in 'after_update' of a gaccum_ms.Transform, or after the training step from what the network "
        f"returns with aux=True."
    )


def _written(cell: nn.Cell) -> list[str]:
    if type(cell).__module__.startswith(_OTHERS):
        return []
    written = written_by(cell, (*_PRIMITIVES, *_FUNCTIONS))
    return written or [name for name, value in held_values(cell) if isinstance(value, _PRIMITIVES)]
