"""A window that stays open between calls, because several batches share an update.

From one batch to the next, the window keeps the accumulators, its position, its sums, and its unit ( `window_unit` ),
the seed of one item. All of these are Parameters: checkpoints contain them, and a compiled step stays valid when the
number of batches of a window changes. Nothing is reduced over ranks until the window ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.saturation import read_flag, saturates
from gaccum_ms.backend.parameters import counter, overwrite, state_parameter
from gaccum_ms.backend.user_warnings import warn_user

if TYPE_CHECKING:
    from gaccum_ms.accumulation.accumulators import GradientSums
    from gaccum_ms.accumulation.noise import NoiseRecord

# The positions in `sums` : a loop adds up losses (times their seeds), counts, and dropped micro-batches.
LOSS, COUNT, DROPPED = 0, 1, 2
SUMS = 3  # how many these are
BATCHES = SUMS  # behind them, of an open window: the batches that were added


class OpenWindow(nn.Cell):
    """A window to which batches are added, until it is complete or flushed. ledger.py has its arithmetic."""

    def __init__(self, owner: str, accumulators: GradientSums, position: ms.Parameter, accumulation_steps: int) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.accumulators = accumulators
        self.records_noise = False
        self.window_loss = state_parameter("window_loss")
        self.window_batches = state_parameter("window_batches")  # of the last window, on this rank
        self.window_position = position
        # A new number applies to later windows: window_steps keeps the number with which the open window began.
        self.accumulation_steps = counter("accumulation_steps", accumulation_steps)
        self.window_steps = counter("window_steps", accumulation_steps)
        self.updates_held = counter("updates_held")  # not 0: no window ends
        # The seed of one item, its factor in accumulators and loss. It is constant over a window, even if batch sizes
        # or the loss scale change; 0 before anything was counted.
        self.window_unit = state_parameter("window_unit")
        self.window_sums = state_parameter("window_sums", (SUMS + 1,))
        self.batch_items = state_parameter("batch_items")  # the last batch's count, NaN if it was bad
        if saturates():  # the device's flag is not enough: other code may clear or set it between two batches
            self.saturated_batches = state_parameter("saturated_batches", (1,))

    def take_noise(self, noise: NoiseRecord) -> None:
        """Empty this record with the window."""
        self.records_noise = True
        self.noise = noise

    # -- compiled ------------------------------------------------------------------------------------------------------

    def begin_batch(self, scale, expected):
        """Count the batch before any of it is added, so that `drop_if_torn` recognises a batch that failed half-way.
        Returns the unit, the loss scale over the window's expected total: the accumulators then hold
        numbers of a mean's size."""
        first = self.window_position == 0
        steps = ops.select(first, self.accumulation_steps + 0, self.window_steps + 0)
        unit = self.unit(scale, expected, steps)
        begun = ops.assign(self.window_steps, ops.depend(steps, unit))
        begun = ops.assign(self.window_position, ops.depend(self.window_position + 1, begun))
        return ops.depend(unit, begun)

    def unit(self, scale, expected, steps):
        """The unit. An unset one is computed for `steps` batches of this count."""
        unit = self.window_unit + 0.0
        new_unit = scale / (expected * ops.cast(steps, ms.float32))
        unit = ops.select(ops.logical_and(unit == 0, expected > 0), new_unit, unit)
        return ops.depend(unit, ops.assign(self.window_unit, unit))

    def with_saturation_noted(self, after):
        """Note the device's flag, at the end of a batch, or of a micro-batch that Python cuts. Returns `after` ."""
        if saturates():
            after = ops.depend(after, ops.assign_add(self.saturated_batches, read_flag(after)))
        return after

    def end_batch(self, sums, count):
        """Keep a batch's sums (loss, count, dropped micro-batches), once all of its gradients are added."""
        sums = self.with_saturation_noted(sums)
        ended = ops.assign(self.window_sums, self.window_sums + ops.concat((sums, ops.ones((1,), ms.float32))))
        return ops.assign(self.batch_items, ops.depend(count, ended))

    def is_complete(self, after):
        """Whether the batch of `after` was the window's last."""
        position = ops.depend(self.window_position, after) + 0
        return ops.logical_and(position >= self.window_steps, self.updates_held == 0)

    def sums_of_window(self, after):
        """The window's sums, once `after` is computed."""
        sums = ops.depend(self.window_sums, after) + 0.0
        # Not sums[BATCHES]: after two interrupted eager gradients, MindSpore accepts no int as an index.
        return ops.depend(sums, ops.assign(self.window_batches, ops.unstack(sums)[BATCHES]))

    def reset(self, after):
        """Empty the window, once `after` is computed."""
        cleared = self.accumulators.reset(after)
        cleared = ops.assign(self.window_position, ops.depend(ms.Tensor(0, ms.int32), cleared))
        cleared = ops.assign(self.window_unit, ops.depend(ms.Tensor(0.0, ms.float32), cleared))
        cleared = ops.assign(self.window_sums, ops.depend(ops.zeros((SUMS + 1,), ms.float32), cleared))
        if saturates():
            cleared = ops.assign(self.saturated_batches, ops.depend(ops.zeros((1,), ms.float32), cleared))
        if self.records_noise:
            cleared = self.noise.reset(cleared)
        return ops.depend(after, cleared)

    # -- not compiled --------------------------------------------------------------------------------------------------

    def begin_eagerly(self) -> None:
        """Count a batch that Python cuts, as `begin_batch` does, before any of it is added."""
        if not self.batches:
            overwrite(self.window_steps, self.accumulation_steps)
        overwrite(self.window_position, ms.Tensor(self.batches + 1, ms.int32))

    def end_eagerly(self, sums: ms.Tensor) -> None:
        """Keep a batch's sums and its count, as `end_batch` does, once all of its gradients are added."""
        *sums_of_batch, items = sums.asnumpy()  # waits
        ended = self.window_sums.asnumpy() + np.array([*sums_of_batch, 1], np.float32)
        overwrite(self.window_sums, ms.Tensor(ended))
        overwrite(self.batch_items, ms.Tensor(items))

    @property
    def batches(self) -> int:
        """Batches in the window."""
        return int(self.window_position.asnumpy())

    @property
    def is_full(self) -> bool:
        """As `is_complete` , outside of a graph."""
        full = self.batches >= int(self.window_steps.asnumpy())
        return full and not int(self.updates_held.asnumpy())

    def drop_if_torn(self) -> None:
        """Drop the window after a batch that began and failed, in its forward and backward or in the update: its
        gradients cannot be separated from the rest."""
        began_no_batch = self.batches == int(self.window_sums.asnumpy()[BATCHES]) and not self.is_full
        if began_no_batch:
            return
        before = self.batches - 1
        self._drop(before, f"a batch failed half-way, and with it the {before} batch(es) before it in its window")

    def drop_used(self) -> None:
        """Drop the window after its flush failed, when the optimizer may have written: no update must repeat it."""
        used = self.batches
        self._drop(used, f"a flush failed when the optimizer may have written, and the {used} batch(es) of its window")

    def _drop(self, batches: int, dropped: str) -> None:
        self.reset_eagerly()
        if batches > 0:
            warn_user(f"For '{self.owner}', {dropped} were dropped. The next batch begins a new window.")

    def reset_eagerly(self) -> None:
        """Empty the window."""
        self.accumulators.reset_eagerly()
        saturated = (self.saturated_batches,) if saturates() else ()
        for parameter in (self.window_position, self.window_unit, self.window_sums, *saturated):
            overwrite(parameter, ops.zeros_like(parameter))
        if self.records_noise:
            self.noise.reset_eagerly()

    def set_steps(self, accumulation_steps: int) -> None:
        """Set the number of batches of later windows."""
        overwrite(self.accumulation_steps, ms.Tensor(accumulation_steps, ms.int32))
