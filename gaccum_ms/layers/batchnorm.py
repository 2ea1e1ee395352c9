"""BatchNorm couples the samples of a micro-batch: finding the layers, and the warning about them."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import mint, nn, ops

from gaccum_ms.backend.held_cells import held_values
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
    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, _BATCH_NORMS)]
    own = [cell for _, cell in network.cells_and_names() if _modes_of_own(cell)[0]]
    pools = [cell for _, cell in network.cells_and_names() if hasattr(cell, "window_statistics")]
    return [*layers, *map(layer_of_parameters, layers), *own, *pools]


def batch_norm_names(network: nn.Cell, as_now: bool = False) -> list[str]:
    """The names of these layers, and of Cells of one's own that use MindSpore's operator. `as_now` : without layers
    that are in evaluation mode now."""
    layers = batch_norms(network)
    own = {name: cell for name, cell in network.cells_and_names() if _modes_of_own(cell)[0]}
    return [name for name, cell in {**layers, **own}.items() if not as_now or _normalises_by_batch(cell)]


def _normalises_by_batch(layer: nn.Cell) -> bool:
    of_own = _modes_of_own(layer)
    if of_own[0]:
        return layer.training or not of_own[1]  # with an operator for each mode, the mode chooses
    layer = layer_of_parameters(layer)
    keeps_none = getattr(layer, "running_mean", layer) is None  # of mint.nn, with track_running_stats=False
    return layer.training or keeps_none or bool(getattr(layer, "use_batch_statistics", None))


def _modes_of_own(cell: nn.Cell) -> tuple[bool, bool]:
    """Whether a Cell of one's own has an `ops.BatchNorm` for training, and one for evaluation."""
    if type(cell).__module__.startswith("mindspore.") or isinstance(cell, _BATCH_NORMS):
        return False, False
    modes = {bool(value.is_training) for _, value in held_values(cell) if isinstance(value, ops.BatchNorm)}
    return True in modes, False in modes


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
        f"statistics are updated {times} per micro-batch: gradients and results differ from the whole batch's. For "
        f"equal results use convert_batchnorm_to_groupnorm(network, num_groups), nn.GroupNorm or nn.LayerNorm, or "
        f"use_batch_statistics=False."
    )


def advice_about_one_value(network: nn.Cell, sizes: Sequence[int]) -> str | None:
    """What to say about micro-batches of one sample, whose variance divides by zero; None if there are none, or no
    BatchNorm layer that it concerns."""
    names = batch_norm_names(network, as_now=True) if 1 in sizes else []
    if rank_and_ranks()[1] > 1:  # SyncBatchNorm then has the samples of all ranks
        together = {name for name, cell in network.cells_and_names() if isinstance(cell, _SYNC_BATCH_NORMS)}
        names = [name for name in names if name not in together]
    if not names:
        return None
    return (
        f"For 'GradAccumulationCell', a micro-batch has one sample, and the network has {len(names)} BatchNorm "
        f"layer(s) ({first_of(names)}). For feature maps of more than one pixel this is harmless; but a layer with "
        f"one value per channel has no variance: its output is constant, and its moving variance becomes NaN for good. "
        f"Use micro-batches of two samples or more, or nn.GroupNorm or nn.LayerNorm."
    )


def trains_batch_norm(network: nn.Cell) -> bool:
    """Whether the network, as it is now, normalises by the statistics of a micro-batch."""
    pools = any(hasattr(cell, "window_statistics") and cell.training for _, cell in network.cells_and_names())
    return pools or bool(batch_norm_names(network, as_now=True))  # a WindowBatchNorm, or others
