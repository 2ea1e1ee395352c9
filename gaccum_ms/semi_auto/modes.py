"""Semi-auto and auto parallel mode, in which MindSpore's compiler gives each device its part of one graph.

The compiler's passes accumulate, in graphs of the form that unrolled_window.py builds. This file checks when they run
and what they cannot do, and finds how the batch is distributed over devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.parallel.auto_parallel import AutoParallel

from gaccum_ms import backend
from gaccum_ms.backend.parameters import PREFIX
from gaccum_ms.distributed.ranks import compiler_distributes
from gaccum_ms.distributed.stages import devices_of_stage
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
from gaccum_ms.splitting.even_split import plan_split

if TYPE_CHECKING:
    from gaccum_ms.options.rules import Setup

_NAME = "GradAccumulationCell"
_READS_TO_SAVE = "mindspore.train.serialization", "_convert_cell_to_param_list"


def held_cell(network: Any) -> Any:
    """The network inside an `AutoParallel` ; any other network itself."""
    return network.network if isinstance(network, AutoParallel) else network


def check_device() -> None:
    """Refuse the CPU, where MindSpore has no such mode, before a graph is compiled."""
    if compiler_distributes() and ms.get_context("device_target") == "CPU":
        raise RuntimeError(
            f"For '{_NAME}', semi-auto and auto parallel mode need GPUs or Ascend, but got the device target 'CPU'. "
            f"Use parallel_mode='data_parallel' there: nothing else need be changed."
        )


@contextlib.contextmanager
def settings_of(network: Any) -> Iterator[None]:
    """Context manager that sets the parallel settings of an `AutoParallel` around the network. MindSpore sets them when
    it compiles the `AutoParallel` ; here they are needed to build from its cell, too. `ms.Model` sets them already."""
    if not isinstance(network, AutoParallel) or backend.auto_parallel_context().get_auto_parallel_new_interface():
        yield
        return
    backend.init_auto_parallel_context(network)
    try:
        yield
    finally:
        backend.clear_auto_parallel_context(network)


@ops.constexpr
def check_built_for(unrolled):
    """At compile time: refuse a step that was built in another parallel mode."""
    if compiler_distributes() != unrolled:
        built, now = (
            ("semi-auto or auto parallel", "another") if unrolled else ("another", "semi-auto or auto parallel")
        )
        raise RuntimeError(
            f"For 'TrainOneStepWithGradAccumulationCell', the parallel mode must be the same when the step is built "
            f"and when it runs, but got a step built in {built} mode, and now {now} mode. Set the mode first; with "
            f"AutoParallel, put it around the cell and not around the step: "
            f"TrainOneStepWithGradAccumulationCell(AutoParallel(cell), optimizer), or ms.Model(AutoParallel(cell), "
            f"optimizer=optimizer)."
        )


@ops.constexpr
def check_windows_of_batches(called_by_python):
    """At compile time: refuse windows of several batches in another graph."""
    if not called_by_python:
        raise RuntimeError(
            f"For '{_NAME}', in semi-auto and auto parallel mode windows of several batches need Python between the "
            f"batches, because the last batch has a graph of its own, but the training step is part of another graph, "
            f"as with data sinking. Use model.train(..., dataset_sink_mode=False)."
        )


def shards_gradients() -> bool:
    """Whether each device accumulates its part of each gradient."""
    return backend.get_grad_accumulation_shard() and bool(ms.get_auto_parallel_context("enable_parallel_optimizer"))


def is_saving() -> bool:
    """Whether MindSpore's function that reads what it saves has called our caller."""
    reader = sys._getframe(2)
    return (reader.f_globals.get("__name__"), reader.f_code.co_name) == _READS_TO_SAVE


def refuse_open_window(step: Any) -> None:
    """Refuse to save a checkpoint in a window. After a training, and after an error, it is saved for its weights:
    `RunRecord` refuses to go on with its window."""
    batches = int(step.window_position.asnumpy())
    if batches and not step.run_record.training_ended and sys.exc_info()[0] is None:
        raise RuntimeError(
            f"For '{_NAME}', in semi-auto and auto parallel mode a checkpoint must be saved between two windows, "
            f"because each device has its own part of the sums, but got one {batches} batch(es) after a window's "
            f"beginning. Call step.flush() first, or save at an update, as gaccum_ms.UpdateCheckpoint does."
        )


def save_records(step: nn.Cell) -> None:
    """Make MindSpore save our records and the optimizer's `global_step` . Once it has compiled, it saves those
    Parameters alone that its graph reads, and with a constant rate no graph reads `global_step` ."""
    records = [
        parameter
        for parameter in step.get_parameters()
        if parameter.name.startswith(PREFIX) and parameter.layerwise_parallel  # averages lie as their weights
    ]
    step_count = getattr(step.optimizer, "global_step", None)
    for parameter in records if step_count is None else (*records, step_count):
        parameter.init_data()
        parameter.sliced = True


def check_network(network: nn.Cell) -> None:
    """Refuse, before anything is built, networks that the compiler's passes cannot accumulate; compatibility.py checks
    the options."""
    if shards_gradients() and ms.get_auto_parallel_context("gradients_mean"):
        raise ValueError(
            f"For '{_NAME}', 'gradients_mean' must be False where 'gradient_accumulation_shard' is True, because the "
            f"compiler's pass then takes the mean over ranks of some weights' gradients and the sum of others', but "
            f"got gradients_mean=True. In semi-auto parallel mode a loss that is a mean is one over all devices: "
            f"gradients_mean=False is right for it."
        )
    if any(isinstance(layer, WindowBatchNorm) for _, layer in network.cells_and_names()):
        raise ValueError(
            f"For '{_NAME}', in semi-auto and auto parallel mode the network must have no WindowBatchNorm, because the "
            f"compiler distributes the layer's inputs over devices, and its sums would be of one. Use nn.GroupNorm, or "
            f"data parallel mode."
        )


def with_accumulators(setup: Setup) -> Setup:
    """Options for windows of several batches: the passes fill accumulators for two or more micro-batches only, so each
    batch is cut into at least two."""
    options = setup.options
    return setup._replace(options=dataclasses.replace(options, micro_size=max(options.micro_size or 1, 2)))


def check_batch(shapes: list[tuple[int, ...]], micro_size: int | None) -> None:
    """Refuse a batch that the compiler cannot cut into equal micro-batches. `shapes` : of this device's parts of the
    inputs, whose first axes may differ: one input may be split over more devices than another."""
    for shape in shapes:
        samples = plan_split([shape], 1, None).samples
        if samples % (micro_size or 1):
            raise ValueError(
                f"For '{_NAME}', in semi-auto and auto parallel mode each device's samples must divide by "
                f"'micro_size', because the compiler cuts one static graph into equal parts, but got {samples} samples "
                f"and micro_size={micro_size}. Drop the last batch (dataset.batch(..., drop_remainder=True)), or use "
                f"data parallel mode, which takes any."
            )


def shards_of_inputs() -> tuple[int, ...]:
    """Into how many shards ``dataset_strategy`` splits the samples of each input over devices: one number for all, or
    one for each. ``(1,)`` if it is unknown (a Layout): that is correct too, but the compiler gathers first."""
    strategy = ms.get_auto_parallel_context("dataset_strategy")
    if ms.get_auto_parallel_context("full_batch") or strategy == "full_batch":
        return (1,)
    if not strategy or strategy == "data_parallel":
        return (devices_of_stage(),)
    if all(isinstance(axes, (tuple, list)) and isinstance(axes[0], int) for axes in strategy):
        return tuple(axes[0] for axes in strategy)
    return (1,)
