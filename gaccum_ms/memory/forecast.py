"""What a training step needs in memory for micro-batches of each size: measured for small ones, predicted for others.

What is measured and predicted is the peak of everything, the update included, in trials (trial.py). It is told apart
for those who read a report: parameters, optimizer state, accumulators and the batch have known sizes; what is there
between two updates beside these is the framework; what comes on top while a step runs are intermediate values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.memory import meter, model
from gaccum_ms.memory.child import TooMuchMemory
from gaccum_ms.memory.token_trial import TokenTrials
from gaccum_ms.memory.trial import Trials

if TYPE_CHECKING:
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as Step

_UNPREDICTABLE = 4  # samples: up to here kernels choose by the size; a trial ends before it has too much
_SPARE = 0.005  # of the limit: what a training of many updates may reach above one of two
_UNSURE = 0.01  # of the limit: what is only predicted may be so much more


class Forecast:
    """Measures what it is told to, and predicts the rest.

    Args:
        owner (str): What errors name.
        cell (GradAccumulationCell): The network and the options.
        optimizer (Optimizer): The optimizer.
        batch (Sequence[Tensor]): The inputs of one batch.
        memory_limit (int or None): Bytes for the peak; None: what the meter finds.
        fails (Callable): Whether an error says that memory is not enough.
        step (TrainOneStepWithGradAccumulationCell, optional): See `Trials` .
    """

    def __init__(
        self,
        owner: str,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        memory_limit: int | None = None,
        fails: Callable[[BaseException], bool] = is_out_of_memory,
        step: Step | None = None,
    ) -> None:
        self.meter = meter.meter()
        self.limit = self.meter.limit() if memory_limit is None else memory_limit
        self._fails = fails
        kind = TokenTrials if cell.trims else Trials
        self._trials = kind(owner, cell, optimizer, batch, self.meter, self.limit, step)
        self.samples, self.sizes, self.unit = self._trials.most, self._trials.sizes, self._trials.unit
        self.is_ragged = self._trials.is_ragged
        network = list(cell.network.get_parameters())
        known = {id(one) for one in network}
        ranks = rank_and_ranks()[1]
        self.parameters = _bytes(network)
        self.optimizer_state = _bytes(one for one in optimizer.get_parameters() if id(one) not in known)
        sums = sum(one.size * _item_bytes(cell.accumulator_dtype or one.dtype) for one in optimizer.parameters)
        lost = sum(one.size * 4 for one in optimizer.parameters) if cell.compensated else 0
        self.accumulators = (sums + lost) // (ranks if cell.shard_accumulators else 1)
        kinds = cell.accumulation_steps > 1, cell.counted, cell.several_losses, cell.finds_size
        self.always_accumulates = any(kinds)
        self.batch = sum(value.nbytes for value in batch)
        # A trial has no other ranks: what it does not have is the sums of theirs.
        self._over_ranks = _bytes(optimizer.parameters) if ranks > 1 else 0
        self.measured: dict[int, int | None] = {}  # samples of a micro-batch: bytes; None: more than there is
        self._whole: dict[int, int] = {}  # of a batch that is one micro-batch
        self._ended: dict[int, int] = {}  # samples of a micro-batch, whose trial ended because of the limit: bytes then
        self.framework = 0

    def probe(self) -> None:
        """Measure the small sizes from which others can be predicted, as far as they fit."""
        samples = self.samples - 1 if self._is_whole(self.samples) else self.samples
        while (size := model.next_probe(self._known(), samples)) is not None:
            if (size > _UNPREDICTABLE and not self.may_fit(size)) or self.measure(size) is None:
                break
        self.probe_whole()

    def probe_whole(self) -> None:
        """Measure small batches that are one micro-batch, where that is another graph: it may need much less."""
        if self._is_whole(self.samples) and not self._whole:
            for size in sorted(self._known())[-2:]:
                if (found := self._tried(size, size)) is not None:
                    self._whole[size] = found

    def _peak(self, size: int, samples: int) -> int:
        used = self._trials.run(size, samples)
        own = self.accumulators if size < samples or self.always_accumulates else 0
        framework = max(0, used.held - self.parameters - self.optimizer_state - self.batch - own)
        self.framework = min(self.framework or framework, framework)  # of the smallest graph
        return used.peak + self._over_ranks

    def _known(self, by: int | None = None) -> dict[int, int]:
        """What was measured, of at most `by` samples, but for the whole batch, where that is another graph."""
        return {
            size: found
            for size, found in self.measured.items()
            if found is not None and size <= (by or size) and not self._is_whole(size)
        }

    def _is_whole(self, size: int) -> bool:
        return size == self.samples > 1 and not self.always_accumulates

    def measure(self, size: int) -> int | None:
        """Bytes at the peak with micro-batches of `size` samples; None: more than there is."""
        if size not in self.measured:
            self.measured[size] = self._tried(size, self.samples)
        return self.measured[size]

    def _tried(self, size: int, samples: int) -> int | None:
        try:
            return self._peak(size, samples)
        except TooMuchMemory as error:
            self._ended[size] = error.reached
            return None
        except Exception as error:
            if not self._fails(error):
                raise
            return None

    def predict(self, size: int, by: int | None = None) -> int:
        """The same, from those measured, of at most `by` samples."""
        if self._whole and self._is_whole(size):
            return model.predict(self._whole, size)
        alike: dict[int, int] = {}
        others: dict[int, int] = {}
        for one, found in self._known(by).items():
            (alike if self.is_ragged(one) == self.is_ragged(size) else others)[one] = found
        if not alike and not others:
            return max(self.limit, *self._ended.values(), 0)
        if len(alike) > 1 or not others:
            return model.predict(alike, size)
        beside = [found - model.predict(others, one) for one, found in alike.items()]
        return model.predict(others, size) + sum(beside)

    def rest(self, size: int) -> int:
        """Bytes of all but intermediate values, with micro-batches of `size` samples."""
        own = self.accumulators if size < self.samples or self.always_accumulates else 0
        return self.framework + self.parameters + self.optimizer_state + own + self.batch

    def peak(self, size: int) -> int:
        """Bytes, measured if they were, else predicted."""
        found = self.measured.get(size)
        return self.predict(size) if found is None else found

    def may_fit(self, size: int) -> bool:
        """Whether nothing speaks against it: neither the limit, nor a size as large that was too much. One that has a
        smaller micro-batch at its end may need more than a larger one that has none, and that more than the whole."""
        failed = [one for one, found in self.measured.items() if found is None and not self._ended_near(one)]
        larger = [one for one in failed if not self.is_ragged(one) and not self._is_whole(one)]
        if size in failed or (size > min(larger, default=size) and not self._is_whole(size)):
            return False
        return self.peak(size) <= self.limit * (1 - _SPARE)

    def _ended_near(self, size: int) -> bool:
        """Whether a trial ended so near to the limit that training, which has no process beside it, will not reach it:
        not before what is predicted, with some room, from half of the samples or more in a graph of the same parts."""
        if size not in self._ended or self._is_whole(size):
            return False
        if not any(2 * one >= size and self.is_ragged(one) == self.is_ragged(size) for one in self._known()):
            return False
        return self._ended[size] <= self.predict(size) <= self.limit * (1 - _SPARE - _UNSURE)


def _bytes(parameters: Iterable[ms.Parameter]) -> int:
    return sum(one.nbytes for one in parameters)


def _item_bytes(dtype: ms.Type) -> int:
    return ms.Tensor(0, dtype).itemsize
