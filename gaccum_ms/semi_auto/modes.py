"""Semi-auto and auto parallel mode, in which MindSpore's compiler gives each device its part of one graph.

The compiler's passes accumulate themselves, in graphs of the form that unrolled_window.py builds. Here is when they
do, what they cannot do, and how the batch lies on the devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.parallel.auto_parallel import AutoParallel

from gaccum_ms import backend
from gaccum_ms.accumulation import micro_batches
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm

_NAME = "GradAccumulationCell"


def compiler_distributes() -> bool:
    """Whether the mode that is set has the compiler distribute graphs."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    return mode in (ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL)


def held_cell(network: Any) -> Any:
    """The network that an `AutoParallel` is around; any other network itself."""
    return network.network if isinstance(network, AutoParallel) else network


def check_device() -> None:
    """Before a graph is compiled.

    Raises:
        RuntimeError: On CPU, where MindSpore has no such mode.
    """
    if compiler_distributes() and ms.get_context("device_target") == "CPU":
        raise RuntimeError(
            f"For '{_NAME}', semi-auto and auto parallel mode need GPUs or Ascend, but got the device target 'CPU'. "
            f"Use parallel_mode='data_parallel' there: nothing else need be changed."
        )


@contextlib.contextmanager
def settings_of(network: Any) -> Iterator[None]:
    """The parallel settings that an `AutoParallel` around the network keeps. MindSpore sets them when it compiles one;
    what is built from the cell in it needs them too. `ms.Model` has set them already."""
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
    """While a step is compiled: it must be for the mode that it was built for."""
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


def check_network(network: nn.Cell) -> None:
    """Refuse, before anything is built, what the compiler's passes cannot do; options are in compatibility.py.

    Raises:
        ValueError: For gradients that the compiler shards and takes the mean of; for layers that need a loop.
    """
    shards_gradients = backend.get_grad_accumulation_shard() and ms.get_auto_parallel_context(
        "enable_parallel_optimizer"
    )
    if shards_gradients and ms.get_auto_parallel_context("gradients_mean"):
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
    refuse_casts(network)


def refuse_casts(network: nn.Cell, by_level: str | None = None) -> None:
    """A weight's cast serves all micro-batches, and the compiler's pass asks of which one it is. In a Cell with
    lazy_inline it does not ask.

    Args:
        network (Cell): The network with its loss.
        by_level (str or None): The mixed-precision level, of those that put casts into a network without saying so.

    Raises:
        ValueError: If there are such casts.
    """
    casting = [type(cell).__name__ for cell in _inlined(network) if by_level or _casts(cell)]
    if casting:
        raise ValueError(
            f"For '{_NAME}', in semi-auto and auto parallel mode the compiler cannot accumulate through the casts of "
            f"weights that to_float() and amp_level make, unless it compiles the network once for all micro-batches, "
            f"but got casts in {', '.join(casting[:3])}{', ...' * (len(casting) > 3)} and a network without "
            f"mindspore.lazy_inline. Decorate the __init__ of the network's outermost Cell (Ascend); or keep the "
            f"weights in the dtype in which they are used."
        )


def _inlined(cell: nn.Cell) -> Iterator[nn.Cell]:
    """The Cells with weights that are compiled anew for each micro-batch: not those within one with lazy_inline."""
    if str(getattr(cell, "cell_init_args", "")).startswith("lazy_inline_"):  # MindSpore's layers have other marks
        return
    if any(True for _ in cell.parameters_and_names(expand=False)):
        yield cell
    for child in cell.cells():
        yield from _inlined(child)


def _casts(cell: nn.Cell) -> bool:
    flags = cell.get_flags()
    return bool(flags.get("fp16") or flags.get("bf16"))


def check_batch(shapes: list[tuple[int, ...]], micro_size: int | None) -> None:
    """Refuse a batch that the compiler cannot cut into equal micro-batches.

    Args:
        shapes (list): Of what this device has of each input. Their first axes may differ: one input may lie on more
            devices than another.
        micro_size (int): The number of micro-batches.

    Raises:
        ValueError: If one does not divide.
    """
    for shape in shapes:
        samples = micro_batches.plan_split([shape], 1, None).samples
        if samples % (micro_size or 1):
            raise ValueError(
                f"For '{_NAME}', in semi-auto and auto parallel mode each device's samples must divide by "
                f"'micro_size', because the compiler cuts one static graph into equal parts, but got {samples} samples "
                f"and micro_size={micro_size}. Drop the last batch (dataset.batch(..., drop_remainder=True)), or use "
                f"data parallel mode, which takes any."
            )


# The same while a graph is compiled: with data sinking no Python of the step's runs before.
compiled_check_batch = ops.constexpr(check_batch)


def parts_of_inputs() -> tuple[int, ...]:
    """In how many parts the samples of each input lie on the devices, as ``dataset_strategy`` says.

    Returns:
        tuple of ints, one for each input, or a single one for all. ``(1,)`` where it cannot be told (a Layout): correct
        for any, only that the compiler gathers what it then cuts.
    """
    strategy = ms.get_auto_parallel_context("dataset_strategy")
    if ms.get_auto_parallel_context("full_batch") or strategy == "full_batch":
        return (1,)
    if not strategy or strategy == "data_parallel":
        return (backend.get_device_num(),)  # of all ranks, where the user has not set "device_num"
    if all(isinstance(axes, (tuple, list)) and isinstance(axes[0], int) for axes in strategy):
        return tuple(axes[0] for axes in strategy)
    return (1,)
