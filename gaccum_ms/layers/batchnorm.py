"""BatchNorm couples the samples of a micro-batch: finding the layers, and the warning about them."""

from __future__ import annotations

import warnings

from mindspore import mint, nn, ops

from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm

_SYNC_BATCH_NORMS = (nn.SyncBatchNorm, mint.nn.SyncBatchNorm)
_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    mint.nn.BatchNorm1d,
    mint.nn.BatchNorm2d,
    mint.nn.BatchNorm3d,
    *_SYNC_BATCH_NORMS,
)


def layer_of_parameters(layer: nn.Cell) -> nn.Cell:
    """The layer itself, or the BatchNorm2d inside a nn.BatchNorm3d."""
    return layer.bn2d if isinstance(layer, nn.BatchNorm3d) else layer


def batch_norms(network: nn.Cell) -> dict[str, nn.Cell]:
    """The layers, by name, that in training normalise by the statistics of a micro-batch."""
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
    """The names of these layers."""
    return list(batch_norms(network))


def refuse_sync_batch_norm(owner: str, network: nn.Cell) -> None:
    """Refuse, on several ranks, SyncBatchNorm layers, which wait for other ranks: each rank tries micro-batches by
    itself."""
    names = [name for name, cell in network.cells_and_names() if isinstance(cell, _SYNC_BATCH_NORMS)]
    if names and rank_and_ranks()[1] > 1:
        raise ValueError(
            f"For '{owner}', each rank must be able to try micro-batches by itself, but got a network with "
            f"SyncBatchNorm layers ({', '.join(names[:3])}), which wait for all ranks. Give the number of samples as "
            f"'micro_batch_size', or use gaccum_ms.WindowBatchNorm."
        )


def warn_about_batch_norm(network: nn.Cell, times: str = "once") -> None:
    """Warn once, for all layers, about the differences from training on the whole batch.

    Args:
        network (Cell): The network with the layers.
        times (str): How often a micro-batch runs forward.
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
            stacklevel=4,
        )


def trains_batch_norm(network: nn.Cell) -> bool:
    """Whether the network, as it is now, normalises by the statistics of a micro-batch: by a layer in training mode, or
    by the operator in a Cell of the user's own."""
    if any(
        layer.training or getattr(layer, "use_batch_statistics", None)
        for layer in map(layer_of_parameters, batch_norms(network).values())
    ):
        return True
    others = [cell for _, cell in network.cells_and_names() if cell.training and not isinstance(cell, _BATCH_NORMS)]
    return any(
        isinstance(cell, WindowBatchNorm)
        or any(isinstance(one, ops.BatchNorm) and one.is_training for one in cell._primitives.values())
        for cell in others
    )
