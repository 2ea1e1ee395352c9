"""The step within the network that ms.Model trains, for callbacks."""

from __future__ import annotations

from typing import Any

from mindspore import nn
from mindspore.train import RunContext

from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


def samples_of_batch(run_context: RunContext) -> int:
    """The number of samples of the batch that a step has just trained on."""
    step: Any = training_step(run_context)
    return run_context.original_args().train_dataset_element[0].shape[step.options.first_axis]


def training_step(run_context: RunContext) -> TrainOneStepWithGradAccumulationCell | None:
    """Our step inside the network that `ms.Model` trains; data sinking wraps it. A `WindowCallback` always has one."""
    return step_in(run_context.original_args().train_network)


def step_in(network: nn.Cell) -> TrainOneStepWithGradAccumulationCell | None:
    steps = (cell for _, cell in network.cells_and_names() if isinstance(cell, TrainOneStepWithGradAccumulationCell))
    return next(steps, None)
