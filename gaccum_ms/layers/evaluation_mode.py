"""A network that is trained in evaluation mode: Dropout drops nothing, and BatchNorm uses its moving statistics."""

from __future__ import annotations

from mindspore import nn

from gaccum_ms.backend.code_of_cells import functions_of
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.checks.arguments import first_of
from gaccum_ms.layers.batchnorm import batch_norm_names
from gaccum_ms.layers.dropout import dropouts


def advice_about_evaluation_mode(owner: str, *networks: nn.Cell) -> str | None:
    """What to say about networks in evaluation mode with layers that this changes; None where a part is in training
    mode: the user then has chosen the parts."""
    cells = [cell for network in networks for _, cell in held_cells(network)]
    if any(cell.training for cell in cells):
        return None
    names = [name or type(network).__name__ for network in networks for name in _layers_with_modes(network)]
    if not names:
        return None
    return (
        f"For '{owner}', the network is trained in evaluation mode, in which Dropout drops nothing and BatchNorm uses "
        f"its moving statistics ({first_of(names)}). MindSpore's Cells begin in this mode: call set_train() of the "
        f"training step, or of the network in a loop, and again after an evaluation."
    )


def _layers_with_modes(network: nn.Cell) -> list[str]:
    normalises_now = batch_norm_names(network, as_now=True)
    names = [*dropouts(network), *(name for name in batch_norm_names(network) if name not in normalises_now)]
    return names + [name for name, cell in held_cells(network) if _reads_its_mode(cell)]


def _reads_its_mode(cell: nn.Cell) -> bool:
    """Whether a Cell of the user's reads `self.training` , as to call `ops.dropout` ."""
    if type(cell).__module__.startswith(("mindspore.", "gaccum_ms.")):
        return hasattr(cell, "window_statistics")  # a WindowBatchNorm
    return any("training" in function.__code__.co_names for function, _ in functions_of(cell))
