"""A trial: the training step with two micro-batches of a size, and its peak memory.

With `MaxTokens` the size is a number of widths: the micro-batches are the largest that so many tokens allow.

On CPU it trains in a copy of this process (child.py), and leaves the update out. An update would write all weights and
all state of the optimizer, of which both processes would then have their own. What it adds is known: the state, as far
as nobody has written it yet. On an accelerator it trains in this process, and everything that it wrote is restored.
Other ranks take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.graphs import compiling_alone
from gaccum_ms.backend.newer_optimizers import refuse_without_kernels
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checks.arguments import check_optimizer, check_positive_int
from gaccum_ms.checks.batches import batch_shapes
from gaccum_ms.cpu.convolutions import limit_instructions_for
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.distributed.ranks import check_parallel_mode, compiler_distributes
from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.memory.child import check_system, run_in_child
from gaccum_ms.memory.limit import default_limit, on_cpu
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import TRIAL, Setup
from gaccum_ms.splitting.even_split import UNCUT, between, cut_axes, plan_split
from gaccum_ms.transforms.chain import others

_UPDATES = 2  # the first compiles; after the second the peak rises by less than 0.1 %

# Makes a step that updates after each batch, of a cell, an optimizer, and the size that is tried.
MakeStep = Callable[[GradAccumulationCell, Any, int], Any]


class Trials:
    """Tries sizes of micro-batches."""

    def __init__(
        self,
        owner: str,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        make_step: MakeStep,
        memory_limit: int | None,
    ) -> None:
        check_optimizer(owner, cell, optimizer)
        refuse_without_kernels(owner, optimizer)
        compatibility.check(TRIAL, owner, Setup(cell.options, cell.network, compiler_distributes()))
        check_parallel_mode(owner)
        refuse_sync_batch_norm(owner, cell.network)
        plan_split(batch_shapes(tuple(batch)), 1, None, cell.shared, cell.axis)
        if memory_limit is not None:
            check_positive_int(owner, "memory_limit", memory_limit)
        self.owner, self.cell, self.optimizer, self.batch = owner, cell, optimizer, batch
        self._make_step = make_step
        self._in_copy = on_cpu()
        if self._in_copy:
            check_system(owner)
        self.given_limit = memory_limit
        self.limit = default_limit() if memory_limit is None else memory_limit
        self._worst = cell.split.worst_case(*batch) if cell.trims else None
        self.samples = self._worst.most if self._worst else batch[0].shape[cell.first_axis]  # the largest size
        self.unit = self._worst.multiple_of if self._worst else 1  # samples, or tokens, of a size of 1
        self._updates = not self._in_copy and not isinstance(optimizer, ShardedOptimizer)
        self._known = self._known_bytes()
        compensation = 4 if cell.accumulators.compensated else 0  # bytes
        self.accumulators = sum(
            parameter.size * (ms.Tensor(0, cell.accumulators.dtype or parameter.dtype).itemsize + compensation)
            for parameter in optimizer.parameters
        )
        limit_instructions_for(cell.network)  # here, for all copies of the process

    @property
    def sizes(self) -> list[int]:
        """Those that are worth trying, ascending."""
        return list(range(1, self.samples + 1)) if self._worst else even_sizes(self.samples)

    def samples_in_graph(self, size: int) -> int:
        """A micro-batch in the loop, and a smaller last one after it."""
        return size if self._worst else size + self.samples % size

    def accumulators_of(self, size: int) -> int:
        """The bytes of accumulators in a training with this size. A batch that is one micro-batch needs none."""
        cell = self.cell
        always = cell.accumulation_steps > 1 or cell.counted or cell.several_losses or cell.finds_size
        return self.accumulators if always or size < self.samples else 0

    def run(self, size: int) -> tuple[int, int]:
        """Train with micro-batches of this size. Returns the bytes of a training at its peak, and how many more a trial
        needs."""
        if self._in_copy:
            peak, copied = run_in_child(self.owner, self.limit, lambda: self._train(size))
        else:
            peak, copied = self._run_here(size), 0
        return peak + self._known, copied

    def _known_bytes(self) -> int:
        """What a trial lacks: the sums over ranks, and the optimizer's state if it does not update."""
        known = bytes_of(self.optimizer.parameters) if rank_and_ranks()[1] > 1 else 0
        if self._updates:
            return known
        return known + bytes_of(value for value in self.optimizer_state() if not _is_written(value))

    def optimizer_state(self) -> list[ms.Parameter]:
        """The optimizer's Parameters that are not the network's."""
        network = {id(parameter) for parameter in self.cell.network.get_parameters()}
        return [parameter for parameter in self.optimizer.get_parameters() if id(parameter) not in network]

    def _run_here(self, size: int) -> int:
        """On an accelerator: bytes at the peak of MindSpore's allocator. All that a trial writes is put back."""
        before = Snapshot(self.cell, self.optimizer)
        ms.runtime.reset_peak_memory_stats()
        try:
            self._train(size)
            ms.runtime.synchronize()
            return ms.runtime.max_memory_allocated()
        except BaseException:
            close_tape()
            raise
        finally:
            before.restore()

    def _train(self, size: int) -> None:
        with _as_if_alone(), compiling_alone():
            cell = self.cell.with_options(transforms=others(self.cell.transforms), **self._options(size))
            step = self._make_step(cell, self.optimizer if self._updates else _NoUpdate(self.optimizer), size)
            batch = self.batch if self._worst else self._first(size, step.window.least())
            for _ in range(_UPDATES):
                loss = step(*batch)
            (loss[0] if isinstance(loss, tuple) else loss).asnumpy()  # waits

    def _options(self, size: int) -> dict[str, Any]:
        """Those with which a step has this size; a cell that finds its size has another step."""
        if self._worst:
            return {"split": self._worst.of(size * self.unit)}
        return {} if self.cell.finds_size else {"micro_size": None, "micro_batch_size": size}

    def _first(self, size: int, least: int) -> Sequence[ms.Tensor]:
        """The batch; if it has many micro-batches, two of them, and the smaller last one."""
        plan = plan_split([(self.samples,)], None, size, least=least)
        if plan.full <= 4:
            return self.batch
        axes = cut_axes(len(self.batch), self.cell.shared, self.cell.axis)
        return [
            value
            if axis == UNCUT
            else ms.Tensor(as_numpy(value)[between(0, 2 * plan.size + plan.rest, axis)], value.dtype)
            for value, axis in zip(self.batch, axes, strict=True)
        ]


def even_sizes(samples: int) -> list[int]:
    """The sizes of micro-batches that divide a batch evenly, ascending: the smallest for each number of them."""
    return sorted({-(-samples // number) for number in range(1, samples + 1)})


def bytes_of(parameters: Iterable[ms.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _is_written(parameter: ms.Parameter) -> bool:
    """Whether a Parameter has its memory: zeros have none before the first write."""
    if parameter.has_init:
        return False
    value = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    return bool(value.asnumpy().any())  # a view: a copy would take memory


class _NoUpdate(nn.Cell):
    """In an optimizer's place: gradients are finished, and nothing is written."""

    def __init__(self, optimizer: nn.Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = optimizer.parameters

    def construct(self, gradients):
        return gradients


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Without other ranks."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)
