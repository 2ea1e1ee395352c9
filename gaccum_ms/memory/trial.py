"""A trial: the training step itself, updates included, with two micro-batches of a size, and its peak memory. With
`MaxTokens` the size is a number of tokens, and the micro-batches are as large as it allows (token_trial.py).

On CPU it trains in a copy of this process (child.py), which leaves neither values nor memory here. On an accelerator it
trains in this process, and everything that it wrote is restored. Other ranks take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.graphs import compiling_alone
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.cpu.convolutions import limit_instructions_for
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer
from gaccum_ms.memory.child import Usage, run_in_child
from gaccum_ms.memory.meter import AllocatorMeter, ProcessMeter
from gaccum_ms.memory.watch import Watch
from gaccum_ms.splitting.even_split import UNCUT, between, cut_axes, plan_split
from gaccum_ms.transforms.chain import others

if TYPE_CHECKING:
    from gaccum_ms.accumulation.window import Window

_UPDATES = 2  # the first compiles; after the second the peak rises by less than 0.1 %


class StepOnTrial(Protocol):
    """A training step that updates after each batch."""

    window: Window

    def __call__(self, *batch: ms.Tensor) -> Any: ...


MakeStep = Callable[[GradAccumulationCell, nn.Optimizer, Any], StepOnTrial]  # of a cell, with the size that is tried


class RealTraining(Protocol):
    """The training that looks for its size."""

    def get_parameters(self) -> Iterable[ms.Parameter]:
        """What it writes."""

    def rehearsed(self, size: Any) -> StepOnTrial:
        """In a copy of the process: its own step, with the size that is tried."""


class Trials:
    """Tries sizes of micro-batches, in samples. `limit` : bytes; with `training` , a trial in a copy of this process
    needs no other step."""

    def __init__(
        self,
        owner: str,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        meter: ProcessMeter | AllocatorMeter,
        limit: int,
        make_step: MakeStep,
        training: RealTraining | None = None,
    ) -> None:
        self.cell = cell
        self.optimizer = optimizer
        self.batch = batch
        self.meter = meter
        self._watch = Watch(owner, limit)
        self._make_step = make_step
        self._training = training
        self.most = batch[0].shape[cell.first_axis]  # the largest size
        limit_instructions_for(cell.network)  # here, for all copies of the process

    multiple_of = 1  # what a size is a multiple of

    @property
    def sizes(self) -> list[int]:
        """Those that are worth trying, ascending."""
        return even_sizes(self.most)

    def is_ragged(self, size: int) -> bool:
        """Whether a smaller micro-batch comes last, which the graph has beside its loop."""
        return self.most % size > 0

    def run(self, size: int, samples: int) -> Usage:
        """Train with micro-batches of `size` samples, of a batch of `samples` or of fewer samples with the same
        graph."""
        if isinstance(self.meter, ProcessMeter):
            return run_in_child(self._watch, lambda: self._train(size, samples), self._written())
        before = Snapshot(self.cell, self.optimizer)
        self._training = None  # its step would keep the trial's window
        try:
            return self.meter.usage(lambda: self._train(size, samples))
        except BaseException:
            close_tape()
            raise
        finally:
            before.restore()

    def _written(self) -> list[ms.Parameter]:
        steps = (self._training,) if self._training is not None else ()
        parameters = (parameter for cell in (self.optimizer, self.cell, *steps) for parameter in cell.get_parameters())
        return list({id(parameter): parameter for parameter in parameters}.values())

    def _train(self, size: int, samples: int) -> None:
        with _as_if_alone(), compiling_alone():
            step = self._step_of(size)
            batch = self._first(step, size, samples)
            for _ in range(_UPDATES):
                loss = step(*batch)
            (loss[0] if isinstance(loss, tuple) else loss).asnumpy()  # waits

    def _step_of(self, size: int) -> StepOnTrial:
        if self._training is not None:
            return self._training.rehearsed(self._cut(size))
        optimizer = _Nothing(self.optimizer) if isinstance(self.optimizer, ShardedOptimizer) else self.optimizer
        cell = self.cell.with_options(transforms=others(self.cell.transforms), **self._options(size))
        return self._make_step(cell, optimizer, self._cut(size))

    def _options(self, size: int) -> dict[str, Any]:
        """Those of the cell with which a new step has this size."""
        return {} if self.cell.finds_size else {"micro_size": None, "micro_batch_size": size}

    def _cut(self, size: int) -> Any:
        """What a step that finds its size itself rehearses with."""
        return size

    def _first(self, step: StepOnTrial, size: int, samples: int) -> list[ms.Tensor]:
        """The batch; if it has many micro-batches, two of them, and the smaller last one."""
        plan = plan_split([(samples,)], None, size, least=step.window.least())
        number = samples if plan.full <= 4 else 2 * plan.size + plan.rest
        if number == self.most:
            return list(self.batch)
        axes = cut_axes(len(self.batch), self.cell.shared, self.cell.axis)
        return [
            value if axis == UNCUT else ms.Tensor(as_numpy(value)[between(0, number, axis)], value.dtype)
            for value, axis in zip(self.batch, axes, strict=True)
        ]


def even_sizes(samples: int) -> list[int]:
    """The sizes of micro-batches that divide a batch evenly, ascending: the smallest for each number of them."""
    return sorted({-(-samples // number) for number in range(1, samples + 1)})


class _Nothing(nn.Cell):
    """Replaces a ShardedOptimizer, which would wait for the other ranks."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = optimizer.parameters

    def construct(self, gradients):
        return gradients


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Without other ranks."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if rank_and_ranks()[1] > 1:
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    try:
        yield
    finally:
        if ms.get_auto_parallel_context("parallel_mode") != mode:
            ms.set_auto_parallel_context(parallel_mode=mode)
