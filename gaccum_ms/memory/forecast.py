"""The memory of a training step for each size of micro-batches: measured for small sizes, predicted for others.

Trials (trial.py) measure the peak of everything, the update included. A report divides it into parts: parameters,
optimizer state, accumulators and the batch have known sizes; the remaining memory between two updates is the framework;
the rest of the peak is intermediate values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.memory import meter, model
from gaccum_ms.memory.token_trial import TokenTrials
from gaccum_ms.memory.trial import MakeStep, RealTraining, Trials
from gaccum_ms.memory.watch import TooMuchMemory

_UNPREDICTABLE = 4  # samples: up to this size kernels vary, so sizes are tried even if predicted not to fit
_SPARE = 0.005  # of the limit: how much a training of many updates may exceed one of two updates
_WRONG = 0.05  # of the limit: how much too large a prediction may be for which a trial is still worth it
_UNSURE = 0.01  # of the limit: how much a peak may exceed its prediction


class Forecast:
    """Measures the requested sizes, and predicts the others. `fails` : whether an error means that memory is not
    enough."""

    def __init__(
        self,
        owner: str,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        make_step: MakeStep,
        memory_limit: int | None = None,
        fails: Callable[[BaseException], bool] = is_out_of_memory,
        training: RealTraining | None = None,
    ) -> None:
        self.meter = meter.meter()
        self.limit = self.meter.limit() if memory_limit is None else memory_limit
        self._fails = fails
        kind = TokenTrials if cell.trims else Trials
        self._trials = kind(owner, cell, optimizer, batch, self.meter, self.limit, make_step, training)
        self.samples, self.sizes, self.multiple_of = self._trials.most, self._trials.sizes, self._trials.multiple_of
        self.is_ragged = self._trials.is_ragged
        network = list(cell.network.get_parameters())
        known = {id(parameter) for parameter in network}
        ranks = rank_and_ranks()[1]
        self.parameters = _bytes(network)
        self.optimizer_state = _bytes(
            parameter for parameter in optimizer.get_parameters() if id(parameter) not in known
        )
        compensation = 4 if cell.accumulators.compensated else 0  # bytes
        self.accumulators = sum(
            parameter.size * (ms.Tensor(0, cell.accumulators.dtype or parameter.dtype).itemsize + compensation)
            for parameter in optimizer.parameters
        )
        self.always_accumulates = any((cell.accumulation_steps > 1, cell.counted, cell.several_losses, cell.finds_size))
        self.batch = sum(value.nbytes for value in batch)
        # A trial has no other ranks, and so lacks the memory of the reduced sums.
        self._over_ranks = _bytes(optimizer.parameters) if ranks > 1 else 0
        self.measured: dict[int, int | None] = {}  # samples of a micro-batch: bytes; None: it did not fit
        self._whole: dict[int, int] = {}  # likewise, for batches that are one micro-batch
        self._ended: dict[int, int] = {}  # samples of a micro-batch whose trial reached the limit: bytes at its end
        self.framework = 0

    def probe(self) -> None:
        """Measure the small sizes from which others can be predicted, as far as they fit."""
        samples = self.samples - 1 if self._is_whole(self.samples) else self.samples
        while (size := model.next_probe(self._known(), samples)) is not None:
            if (size > _UNPREDICTABLE and not self.may_fit(size)) or self.measure(size) is None:
                break
        self.probe_whole()

    def probe_whole(self) -> None:
        """Measure small batches that are one micro-batch, if their graph is another: it may need much less."""
        if self._is_whole(self.samples) and not self._whole:
            for size in sorted(self._known())[-2:]:
                if (peak := self._tried(size, size)) is not None:
                    self._whole[size] = peak

    def _peak(self, size: int, samples: int) -> int:
        used = self._trials.run(size, samples)
        own = self.accumulators if size < samples or self.always_accumulates else 0
        framework = max(0, used.after - self.parameters - self.optimizer_state - self.batch - own)
        self.framework = min(self.framework or framework, framework)  # that of the smallest graph
        return used.peak + self._over_ranks

    def _known(self, by: int | None = None) -> dict[int, int]:
        """The measured sizes of at most `by` samples, without the whole batch if its graph is another."""
        return {
            size: peak
            for size, peak in self.measured.items()
            if peak is not None and size <= (by or size) and not self._is_whole(size)
        }

    def _is_whole(self, size: int) -> bool:
        return size == self.samples > 1 and not self.always_accumulates

    def measure(self, size: int) -> int | None:
        """Bytes at the peak with micro-batches of `size` samples; None: they did not fit."""
        if size not in self.measured:
            self.measured[size] = self._tried(size, self.samples)
        return self.measured[size]

    def _tried(self, size: int, samples: int) -> int | None:
        try:
            return self._peak(size, samples)
        except TooMuchMemory as error:
            self._ended[size] = error.reached
        except Exception as error:
            if not self._fails(error):
                raise
        return None

    def predict(self, size: int, by: int | None = None) -> int:
        """The predicted bytes at the peak, from measured sizes of at most `by` samples."""
        if self._whole and self._is_whole(size):
            return model.predict(self._whole, size)
        alike: dict[int, int] = {}
        others: dict[int, int] = {}
        for other, peak in self._known(by).items():
            (alike if self.is_ragged(other) == self.is_ragged(size) else others)[other] = peak
        if not alike and not others:
            return max(self.limit, *self._ended.values(), 0)
        if len(alike) > 1 or not others:
            return model.predict(alike, size)
        beside = [peak - model.predict(others, other) for other, peak in alike.items()]
        return model.predict(others, size) + sum(beside)

    def rest(self, size: int) -> int:
        """Bytes of everything except intermediate values, with micro-batches of `size` samples."""
        own = self.accumulators if size < self.samples or self.always_accumulates else 0
        return self.framework + self.parameters + self.optimizer_state + own + self.batch

    def peak(self, size: int) -> int:
        """Bytes at the peak, measured if available, else predicted."""
        peak = self.measured.get(size)
        return self.predict(size) if peak is None else peak

    def may_fit(self, size: int) -> bool:
        """Whether a size may fit: its peak is within the limit, and no smaller comparable size has failed. Failures of
        ragged sizes and of the whole batch do not count against larger sizes: a ragged size may need more than a larger
        one that divides the batch, and that one more than the whole batch."""
        failed = [other for other, peak in self.measured.items() if peak is None and not self._ended_near(other)]
        larger = [other for other in failed if not self.is_ragged(other) and not self._is_whole(other)]
        if size in failed or (size > min(larger, default=size) and not self._is_whole(size)):
            return False
        return self.keeps(self.peak(size))

    def keeps(self, peak: int) -> bool:
        """Whether a training with a peak of so many bytes keeps the limit."""
        return peak <= self.limit * (1 - _SPARE)

    def is_close(self, size: int) -> bool:
        """Whether a size that was not tried may fit after all: its prediction exceeds the limit by little, and no even
        size has failed; or it is ragged, and smaller sizes have reached the limit."""
        predicted = self.predict(size)
        failed = [other for other, peak in self.measured.items() if peak is None]
        if any(other not in self._ended for other in failed):
            return False  # it failed in another way: larger sizes will fail too
        if not self.is_ragged(size) and not all(map(self.is_ragged, failed)):
            return False
        return bool(failed or not self.keeps(predicted)) and predicted <= self.limit * (1 + _WRONG)

    def _ended_near(self, size: int) -> bool:
        """Whether a trial was ended though training, without a second process, will probably fit. The prediction must
        use a measured size of at least half the samples, with a graph of the same parts. It must be at least the bytes
        that the trial reached, and below the limit by some margin. So must a line from the smallest measured size: the
        two largest, which the prediction uses, may differ too little by chance."""
        if size not in self._ended or self._is_whole(size):
            return False
        alike = {other: peak for other, peak in self._known().items() if self.is_ragged(other) == self.is_ragged(size)}
        if 2 * max(alike, default=0) < size:
            return False
        from_the_smallest = model.predict({other: alike[other] for other in (min(alike), max(alike))}, size)
        predicted = self.predict(size)
        most = self.limit * (1 - _SPARE - _UNSURE)
        return self._ended[size] <= predicted <= most and from_the_smallest <= most


def _bytes(parameters: Iterable[ms.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)
