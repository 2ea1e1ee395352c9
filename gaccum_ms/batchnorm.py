"""BatchNorm couples the samples of a micro-batch: what that means for accumulation, and the warning about it."""

from __future__ import annotations

import warnings

from mindspore import mint, nn

_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.SyncBatchNorm,
    mint.nn.BatchNorm1d,
    mint.nn.BatchNorm2d,
    mint.nn.BatchNorm3d,
    mint.nn.SyncBatchNorm,
)


def layer_of_parameters(layer: nn.Cell) -> nn.Cell:
    """The layer itself, or the 2d one that a nn.BatchNorm3d holds."""
    return layer.bn2d if isinstance(layer, nn.BatchNorm3d) else layer


def batch_norms(network: nn.Cell) -> dict[str, nn.Cell]:
    """The layers, by name, that normalise by the statistics of a micro-batch in training."""
    found = {
        name: cell for name, cell in network.cells_and_names() if isinstance(cell, (*_BATCH_NORMS, nn.BatchNorm3d))
    }
    held = {id(cell.bn2d) for cell in found.values() if isinstance(cell, nn.BatchNorm3d)}
    return {
        name: cell
        for name, cell in found.items()
        if id(cell) not in held and getattr(layer_of_parameters(cell), "use_batch_statistics", None) is not False
    }


def batch_norm_names(network: nn.Cell) -> list[str]:
    """Their names."""
    return list(batch_norms(network))


def warn_about_batch_norm(network: nn.Cell, times: str = "once") -> None:
    """One warning, however many layers, that says what will differ from training on the whole batch.

    Args:
        network (Cell): Where the layers are.
        times (str): How often a micro-batch goes forward.
    """
    names = batch_norm_names(network)
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"For 'GradAccumulationCell', the network has {len(names)} BatchNorm layer(s) ({shown}). In training each "
            f"normalises by the mean and variance of one micro-batch, not of the whole batch, and its moving "
            f"statistics are updated {times} per micro-batch: gradients and results differ from the whole batch's. For "
            f"equal results use convert_batchnorm_to_groupnorm(network, num_groups), nn.GroupNorm or nn.LayerNorm, or "
            f"use_batch_statistics=False.",
            UserWarning,
            stacklevel=3,
        )
