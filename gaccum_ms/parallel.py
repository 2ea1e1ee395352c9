"""What differs by parallel mode. Stand-alone and data parallel share one step; its reducer is MindSpore's own.

In data parallel mode `nn.TrainOneStepCell` builds the `nn.DistributedGradReducer` that obeys ``gradients_mean``; the
step calls it once per update, after the loop.
"""

from __future__ import annotations

import mindspore as ms


def check_parallel_mode() -> None:
    """Refuse, before anything is built, the modes in which MindSpore's compiler would have to cut our loop in parts.

    Raises:
        RuntimeError: In semi-auto and auto parallel mode, and with pipeline stages.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode in (ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL):
        raise RuntimeError(
            f"For 'GradAccumulationCell', the parallel mode must be 'stand_alone' or 'data_parallel', but got "
            f"'{mode}'. In this mode use MindSpore's own 'mindspore.parallel.nn.GradAccumulation' (Ascend or GPU), "
            f"whose loss is the sum over micro-batches; or set parallel_mode='data_parallel'."
        )
    stages = ms.get_auto_parallel_context("pipeline_stages")
    if stages > 1:
        raise RuntimeError(
            f"For 'GradAccumulationCell', 'pipeline_stages' must be 1, but got {stages}. A pipeline splits its batches "
            f"itself: use 'mindspore.parallel.nn.Pipeline'."
        )
