"""Hooks of the user's, which see what a micro-batch has, and not what the batch has."""

from __future__ import annotations

from mindspore import nn

from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.backend.random_operators import has_forward_hooks
from gaccum_ms.checks.arguments import first_of


def advice_about_hooked_weights(network: nn.Cell) -> str | None:
    """What to say about weights with hooks; None if there are none."""
    names = [weight.name for weight in network.trainable_params() if getattr(weight, "hooks", list)()]
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', {len(names)} weight(s) have hooks ({first_of(names)}), which get each "
        f"micro-batch's part of the gradient: what a hook clips, rounds or normalises is then not the batch's "
        f"gradient. Give the cell 'transforms', which get the finished one."
    )


def advice_about_forward_hooks(network: nn.Cell) -> str | None:
    """What to say about forward hooks in a network that a graph calls twice; None if there are none."""
    names = [name or type(cell).__name__ for name, cell in held_cells(network) if has_forward_hooks(cell)]
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', the network has {len(names)} Cell(s) with forward hooks ({first_of(names)}), "
        f"which MindSpore runs too often where a graph calls a Cell twice, as with a 'WithBatchLossCell' and in "
        f"semi-auto and auto parallel mode: if a hook changes values, loss and gradient are wrong. Write into "
        f"'construct' what it does."
    )
