"""BatchNorm couples the samples of a micro-batch: finding the layers, and the warning about them."""

from __future__ import annotations

from mindspore import mint, nn

from gaccum_ms.checks.arguments import first_of
from gaccum_ms.distributed.layout import rank_and_ranks

_SYNC_BATCH_NORMS = (nn.SyncBatchNorm, mint.nn.SyncBatchNorm)
_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
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
    layers = {name: cell for name, cell in network.cells_and_names() if isinstance(cell, _BATCH_NORMS)}
    inner = {id(cell.bn2d) for cell in layers.values() if isinstance(cell, nn.BatchNorm3d)}
    return {
        name: cell
        for name, cell in layers.items()
        if id(cell) not in inner and getattr(layer_of_parameters(cell), "use_batch_statistics", None) is not False
    }


def layers_with_statistics(network: nn.Cell) -> list[nn.Cell]:
    """The Cells whose mode decides whether they normalise by a micro-batch, WindowBatchNorm too."""
    cells = [cell for _, cell in network.cells_and_names()]
    return [cell for cell in cells if isinstance(cell, _BATCH_NORMS) or hasattr(cell, "window_statistics")]


def batch_norm_names(network: nn.Cell, as_now: bool = False) -> list[str]:
    """Their names. `as_now` : without layers that are in evaluation mode now."""
    return [name for name, cell in batch_norms(network).items() if not as_now or _normalises_by_batch(cell)]


def _normalises_by_batch(layer: nn.Cell) -> bool:
    layer = layer_of_parameters(layer)
    keeps_none = getattr(layer, "running_mean", layer) is None  # of mint.nn, with track_running_stats=False
    return layer.training or keeps_none or bool(getattr(layer, "use_batch_statistics", None))


def refuse_sync_batch_norm(owner: str, network: nn.Cell) -> None:
    """Refuse, on several ranks, SyncBatchNorm layers, which wait for other ranks: each rank tries micro-batches by
    itself."""
    names = [name for name, cell in network.cells_and_names() if isinstance(cell, _SYNC_BATCH_NORMS)]
    if names and rank_and_ranks()[1] > 1:
        raise ValueError(
            f"For '{owner}', each rank must be able to try micro-batches by itself, but got a network with "
            f"SyncBatchNorm layers ({first_of(names)}), which wait for all ranks. Give the number of samples as "
            f"'micro_batch_size', or use gaccum_ms.WindowBatchNorm."
        )


def advice_about_batch_norm(network: nn.Cell, times: str = "once") -> str | None:
    """What to say, for all layers, about the differences from training on the whole batch; None without such layers.
    `times` : how often a micro-batch runs forward."""
    names = batch_norm_names(network, as_now=True)
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', the network has {len(names)} BatchNorm layer(s) ({first_of(names)}). In "
        f"training each normalises by the mean and variance of one micro-batch, not of the whole batch, and its moving "
        f"statistics are updated {times} per micro-batch: gradients and results differ from the whole batch's, and in "
        f"a micro-batch of one sample a layer with one value per channel has no variance: its moving variance becomes "
        f"NaN for good. For equal results use convert_batchnorm_to_groupnorm(network, num_groups), nn.GroupNorm or "
        f"nn.LayerNorm, or use_batch_statistics=False."
    )


def trains_batch_norm(network: nn.Cell) -> bool:
    """Whether the network, as it is now, normalises by the statistics of a micro-batch."""
    pools = any(hasattr(cell, "window_statistics") and cell.training for _, cell in network.cells_and_names())
    return pools or bool(batch_norm_names(network, as_now=True))  # a WindowBatchNorm, or others
