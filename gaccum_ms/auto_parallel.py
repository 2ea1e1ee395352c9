"""Semi-auto and auto parallel mode, in which MindSpore's compiler gives each device its part of one graph.

The compiler's passes accumulate themselves, in graphs of the form that unrolled_window.py builds. Here is when they
do, what they cannot do, and how the batch lies on the devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import ops
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.parallel.auto_parallel import AutoParallel

from gaccum_ms import split
from gaccum_ms.cell import GradAccumulationCell

_NAME = "GradAccumulationCell"


def compiler_distributes() -> bool:
    """Whether the mode that is set has the compiler distribute graphs."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    return mode in (ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL)


def held_cell(network: Any) -> Any:
    """The network that an `AutoParallel` is around; any other network itself."""
    return network.network if isinstance(network, AutoParallel) else network


@contextlib.contextmanager
def settings_of(network: Any) -> Iterator[None]:
    """The parallel settings that an `AutoParallel` around the network keeps; MindSpore sets them when it compiles, but
    what is built before depends on them too. `ms.Model` has set them already."""
    if not isinstance(network, AutoParallel) or compiler_distributes():
        yield
        return
    _init_auto_parallel_context(network)
    try:
        yield
    finally:
        _clear_auto_parallel_context(network)


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


def check_options(cell: GradAccumulationCell) -> None:
    """Refuse, before anything is built, what the compiler's passes cannot do.

    Raises:
        RuntimeError: In PyNative mode.
        ValueError: For options that need a loop, or accumulators that outlive a batch.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        raise RuntimeError(
            f"For '{_NAME}', semi-auto and auto parallel mode need graph mode, because the compiler distributes "
            f"graphs, but got PyNative mode. Use ms.set_context(mode=ms.GRAPH_MODE)."
        )
    for name, given, allowed, why in (
        (
            "micro_batch_size",
            cell.micro_batch_size,
            None,
            "the compiler must know the number of micro-batches before it sees a batch; give 'micro_size'",
        ),
        (
            "accumulation_steps",
            cell.accumulation_steps,
            1,
            "the compiler reduces over devices at the end of each "
            "batch's backward; give larger batches and a larger 'micro_size', which need no more memory",
        ),
        (
            "compensated",
            cell.compensated,
            False,
            "the compiler's own pass adds the gradients; give accumulator_dtype=mindspore.float32",
        ),
        ("overflow", cell.overflow, "drop_window", "the compiler's own pass adds the gradients, and leaves none out"),
        ("loss_weights", cell.loss_weights, (1.0,), "the compiler knows one loss; add them up in the network"),
    ):
        if given != allowed:
            raise ValueError(
                f"For '{_NAME}', in semi-auto and auto parallel mode the argument '{name}' must be {allowed!r}, but "
                f"got {given!r}: {why}. Data parallel mode has no such limit."
            )


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
        samples = split.plan_split([shape], 1, None).samples
        if samples % (micro_size or 1):
            raise ValueError(
                f"For '{_NAME}', in semi-auto and auto parallel mode each device's samples must divide by "
                f"'micro_size', because the compiler cuts one static graph into equal parts, but got {samples} samples "
                f"and micro_size={micro_size}. Drop the last batch (dataset.batch(..., drop_remainder=True)), or use "
                f"data parallel mode, which takes any."
            )


# The same while a graph is compiled: with data sinking no Python of the step's runs before.
compiled_check_batch = ops.constexpr(check_batch)


def input_strategies() -> tuple[tuple[int, ...], ...]:
    """In how many parts each input's axes lie on the devices, as ``dataset_strategy`` says.

    Returns:
        tuple of tuples, one for each input; one of length 1, parts along axis 0, if it holds for all. ``((1,),)``
        where it cannot be told (a Layout): correct for any, only that the compiler gathers what it then cuts.
    """
    strategy = ms.get_auto_parallel_context("dataset_strategy")
    if ms.get_auto_parallel_context("full_batch") or strategy == "full_batch":
        return ((1,),)
    if strategy in ("", (), [], None, "data_parallel"):
        return ((ms.get_auto_parallel_context("device_num"),),)
    if all(isinstance(one, (tuple, list)) and all(isinstance(parts, int) for parts in one) for one in strategy):
        return tuple(tuple(one) for one in strategy)
    return ((1,),)
