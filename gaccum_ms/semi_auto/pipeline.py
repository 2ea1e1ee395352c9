"""Pipelines: the network's Cells lie on several stages of devices, between which MindSpore's passes send micro-batches.

The passes take the graph of `BatchSums` with three differences:

    slices       all micro-batches are cut out of one Reshape of an input, along axis 1         (PipelineSlices)
    totals       only the last stage knows counts and denominators, after its last forward, so no total comes first
    sums         the last stage alone has them; they are added over the stages after backward   (OverStages)

The sum over stages comes after all that a stage sends and receives. Before backward, a stage would wait in it for one
that still waits to send.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from mindspore import nn, ops
from mindspore.communication import create_group

from gaccum_ms import backend
from gaccum_ms.checks.arguments import first_of
from gaccum_ms.distributed.stages import devices_of_stage, stages, stages_of_weights
from gaccum_ms.semi_auto.operators import each, reshape
from gaccum_ms.semi_auto.shard_slice import plan_of_slices

_NAME = "GradAccumulationCell"


def check_pipeline(network: nn.Cell, micro_size: int | None) -> None:
    """Refuse, before anything is built and on all ranks alike, what the compiler refuses on some of them."""
    number = stages()
    if (micro_size or 1) < number:
        raise ValueError(
            f"For '{_NAME}', 'micro_size' must be at least the number of pipeline stages, so that each stage has a "
            f"micro-batch to work on, but got micro_size={micro_size} and {number} stages. Raise 'micro_size', or "
            f"lower 'pipeline_stages'."
        )
    stage_of = stages_of_weights(network)
    trained = {weight.name: stage_of[weight.name] for weight in network.trainable_params()}
    outside = [name for name, stage in trained.items() if not 0 <= stage < number]
    if outside:
        raise ValueError(
            f"For '{_NAME}', with pipeline_stages={number} each trained weight must belong to a Cell with a "
            f"'pipeline_stage' of 0 to {number - 1}, or lie within one, but got none for {first_of(outside, 5)}. Set "
            f"it: cell.pipeline_stage = 0."
        )
    idle = sorted(set(range(number)) - set(trained.values()))
    if idle:
        raise ValueError(
            f"For '{_NAME}', each of the {number} pipeline stages must have a trained weight, but got none for "
            f"stage(s) {', '.join(map(str, idle))}. Move a Cell there, train one of its weights, or lower "
            f"'pipeline_stages'."
        )


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Context manager that says what the compiler's error for a weight of two stages means."""
    try:
        yield
    except Exception as error:
        if "For 'AddN', input shape must be same" not in str(error):
            raise
        raise ValueError(
            f"For '{_NAME}', a weight that two pipeline stages use must lie whole on each device, but the compiler got "
            f"parts of one: optimizer parallel shards it. Give it "
            f"mindspore.Parameter(..., parallel_optimizer=False)."
        ) from error


own_gradient = ops.MultitypeFuncGraph("gaccum_ms_own_gradient")


@own_gradient.register("Tensor", "Bool")
def _own_gradient(gradient, is_owned):
    """A weight that two stages use has its whole gradient on its own stage. On the other there is a copy, which no
    forward reads, and a part of the gradient, which would be in the norm twice."""
    return gradient if is_owned else gradient * 0.0


class PipelineSlices(nn.Cell):
    """Cut all micro-batches out of an input, in the form that the passes know: one Reshape, which all of them share,
    and one StridedSlice for each, along axis 1. The devices of a stage split the samples into `shards` ."""

    def __init__(self, micro_size: int, shards: int) -> None:
        super().__init__(auto_prefix=False)
        self.micro_size = micro_size
        self.shards = shards
        self.slice = ops.StridedSlice()

    def construct(self, value):
        whole, begins, ends, shape = plan_of_slices(value.shape, self.shards, self.micro_size)
        return each(ops.partial(self.cut, reshape(value, whole), whole[2], shape), begins, ends)

    def cut(self, parted, numbers, shape, begin, end):
        """The micro-batch of samples `begin` to `end` of each part; `numbers` : of a sample."""
        return reshape(self.slice(parted, (0, begin, 0), (self.shards, end, numbers), (1, 1, 1)), shape)


class OverStages(nn.Cell):
    """Give the sums of the last stage to all, once `after` is computed. On the other stages they are zero."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.sum_over_stages = ops.AllReduce(group=_group_over_stages())

    def construct(self, sums, after):
        if sums.ndim > 0:
            return self.sum_over_stages(ops.depend(sums, after))
        return reshape(self.sum_over_stages(ops.depend(ops.expand_dims(sums, 0), after)), ())


def _group_over_stages() -> str:
    """The group of the ranks at this rank's place in each stage, under MindSpore's own name for it."""
    own = devices_of_stage()
    ranks = [backend.get_global_rank() % own + stage * own for stage in range(stages())]
    name = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:48]
    create_group(name, ranks)
    return name
