"""The stages of a pipeline: their number, their devices, and the weights that belong to each."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn

from gaccum_ms import backend


def stages() -> int:
    """The number of pipeline stages; 1 without a pipeline."""
    return ms.get_auto_parallel_context("pipeline_stages")


def devices_of_stage() -> int:
    """The number of devices of each stage; of all ranks, unless the user has set ``device_num`` ."""
    return backend.get_device_num() // stages()


def stages_of_weights(network: nn.Cell) -> dict[str, int]:
    """The stage to which each weight belongs, by its name: that of its Cell, or of the Cell around it; -1 without."""
    result: dict[str, int] = {}

    def visit(cell: nn.Cell, around: int) -> None:
        stage = getattr(cell, "pipeline_stage", around)
        for _, parameter in cell.parameters_and_names(expand=False):
            known = result.setdefault(parameter.name, stage)
            if 0 <= stage < known or known < 0:  # of two Cells, the first stage updates it
                result[parameter.name] = stage
        for child in cell.cells():
            visit(child, stage)

    visit(network, -1)
    return result


def owned_weights(network: nn.Cell | None, weights: Sequence[ms.Parameter]) -> tuple[bool, ...]:
    """Whether each weight belongs to this device's stage. Without a pipeline all do, and no network need be known."""
    if stages() == 1 or network is None:
        return (True,) * len(weights)
    stage_of, own = stages_of_weights(network), backend.get_global_rank() // devices_of_stage()
    return tuple(stage_of.get(weight.name) == own for weight in weights)
