"""What a training step needs in memory for micro-batches of each size: measured for small ones, predicted for others.

The peak is a sum: parameters, optimizer state, accumulators and the batch have known sizes; intermediate values and
workspace are measured in micro-steps, or predicted from smaller ones; and what the process held beside all these at the
smallest of them is the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.memory import meter as memory_meter
from gaccum_ms.memory import model as memory_model
from gaccum_ms.memory.trial import MicroSteps


class Forecast:
    """Measures the small micro-steps when it is made, and others when it is asked to.

    Args:
        cell (GradAccumulationCell): The network and the options.
        optimizer (Optimizer): The optimizer.
        batch (Sequence[Tensor]): The inputs of one batch.
        memory_limit (int or None): Bytes for the peak; None: what the meter finds.
        fails (Callable): Whether an error says that memory is not enough.
    """

    def __init__(
        self,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        memory_limit: int | None = None,
        fails: Callable[[BaseException], bool] = is_out_of_memory,
    ) -> None:
        self.meter = memory_meter.meter()
        self.limit = self.meter.limit() if memory_limit is None else memory_limit
        self.samples = batch[0].shape[0]
        self._fails = fails
        self._steps = MicroSteps(cell, optimizer, batch, self.meter)
        network = list(cell.network.get_parameters())
        known = {id(one) for one in network}
        self.parameters = _bytes(network)
        self.optimizer_state = _bytes(one for one in optimizer.get_parameters() if id(one) not in known)
        self.accumulators = self._steps.accumulator_bytes // (rank_and_ranks()[1] if cell.shard_accumulators else 1)
        kinds = cell.accumulation_steps > 1, cell.counted, cell.several_losses, cell.finds_size
        self._always_accumulates = any(kinds)
        # In windows of several batches, what is there before each is kept, to be put back; by the host.
        keeps_copy = cell.finds_size and cell.accumulation_steps > 1 and ms.get_context("device_target") == "CPU"
        self._copies = 2 if keeps_copy else 1
        self.batch = sum(value.nbytes for value in batch)
        self.measured: dict[int, int | None] = {}  # samples: bytes of intermediate values; None: not enough memory
        self.framework = 0
        self._probe()

    def _probe(self) -> None:
        used = self._steps.measure(1)  # memory for one sample there must be
        self.measured[1] = self._intermediate(used)
        held = self.meter.held() - self.parameters - self._steps.accumulator_bytes - self.batch
        self.framework = max(0, held - self._intermediate(used))
        while (size := memory_model.next_probe(self._known(), self.samples)) is not None:
            largest = max(self.measured)
            while size > largest and self.peak(size) > self.limit:
                size //= 2
            if size <= largest or self.measure(size) is None:
                break

    def _known(self, by: int | None = None) -> dict[int, int]:
        """What was measured, of at most `by` samples."""
        return {size: found for size, found in self.measured.items() if found is not None and size <= (by or size)}

    def _intermediate(self, used: int) -> int:
        """Of what a micro-step used."""
        return max(0, used - self.parameters - self._steps.accumulator_bytes)

    def measure(self, size: int) -> int | None:
        """Bytes of intermediate values and workspace in a micro-step of `size` samples; None: not enough memory."""
        if size not in self.measured:
            try:
                self.measured[size] = self._intermediate(self._steps.measure(size))
            except Exception as error:
                if not self._fails(error):
                    raise
                self.measured[size] = None
        return self.measured[size]

    def predict(self, size: int, by: int | None = None) -> int:
        """The same, from those measured, of at most `by` samples."""
        return memory_model.predict(self._known(by), size)

    def rest(self, size: int) -> int:
        """Bytes of all but intermediate values, with micro-batches of `size` samples."""
        own = self._copies * self.accumulators if size < self.samples or self._always_accumulates else 0
        return self.framework + self.parameters + self.optimizer_state + own + self.batch

    def peak(self, size: int) -> int:
        """Bytes of all, measured if it was, else predicted."""
        found = self.measured.get(size)
        return self.rest(size) + (self.predict(size) if found is None else found)

    def may_fit(self, size: int) -> bool:
        """Whether nothing speaks against it: neither the limit, nor a size as large that was out of memory."""
        failed = [one for one, found in self.measured.items() if found is None]
        return size < min(failed, default=size + 1) and self.peak(size) <= self.limit


def _bytes(parameters: Iterable[ms.Parameter]) -> int:
    return sum(one.nbytes for one in parameters)
