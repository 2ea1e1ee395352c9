"""A window that stays open between calls, because several batches share an update.

What must survive from one batch to the next: the accumulators, the window's place, its sums, and the unit they are in.
All of it is in Parameters, so that it is in checkpoints too, and so that a step that is already compiled follows when
the number of batches of a window changes. Until the window ends nothing is reduced over ranks.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.saturation import read_flag, saturates
from gaccum_ms.backend.parameters import counter, overwrite, record

if TYPE_CHECKING:
    from gaccum_ms.accumulation.accumulators import Accumulators
    from gaccum_ms.accumulation.reduction import CountedReduction


class OpenWindow(nn.Cell):
    """A window to which batches are added, until it is complete or flushed.

    Args:
        owner (str): The class that warnings name.
        accumulators (Accumulators): Where the gradients of its batches add up.
        reduction (CountedReduction): Makes their mean over all batches and ranks.
        position (Parameter): Batches of the open window so far, int32 of shape ().
        accumulation_steps (int): Batches of each window.
    """

    may_skip = True  # a window that counts nothing must not update
    needs_division = True
    is_sharded = False
    spans_batches = True

    def __init__(
        self,
        owner: str,
        accumulators: Accumulators,
        reduction: CountedReduction,
        position: ms.Parameter,
        accumulation_steps: int,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.accumulators = accumulators
        self.reduction = reduction
        self.window_count = reduction.window_count
        self.dropped_micro_batches = reduction.dropped_micro_batches
        self.records_noise = reduction.records_noise
        if reduction.records_noise:
            self.noise = reduction.noise
        self.window_loss = record("window_loss")
        self.window_batches = record("window_batches")  # of the last window, on this rank
        self.window_position = position
        # A new number is for windows to come: the open one keeps, in window_steps, the one that it began with.
        self.accumulation_steps = counter("accumulation_steps", accumulation_steps)
        self.window_steps = counter("window_steps", accumulation_steps)
        self.updates_held = counter("updates_held")  # not 0: no window ends
        # What one item contributes to accumulators and loss. It stays the same for a whole window, whatever batches and
        # loss scale do; 0 before anything was counted.
        self.window_unit = record("window_unit")
        self.window_sums = record("window_sums", (4,))  # loss, count, dropped micro-batches, batches that were added
        self.batch_items = record("batch_items")  # what the last batch counted, NaN where its count was bad
        if saturates():  # the device's flag would not do: between two batches other code may clear it, or set it
            self.saturated_batches = record("saturated_batches", (1,))

    # -- compiled ------------------------------------------------------------------------------------------------------

    def begin_batch(self, scale, count):
        """Count the batch before any of it is added: `drop_if_torn` can then tell one that failed half-way. Returns the
        window's unit: one over its expected total, so that the accumulators hold numbers of a mean's size."""
        first = self.window_position == 0
        steps = ops.select(first, self.accumulation_steps + 0, self.window_steps + 0)
        unit, _ = self.unit_of(scale, count, steps)
        begun = ops.depend(ops.assign(self.window_steps, steps), unit)
        begun = ops.assign(self.window_unit, ops.depend(unit, begun))
        begun = ops.assign(self.window_position, ops.depend(self.window_position + 1, begun))
        return ops.depend(unit, begun)

    def unit_of(self, scale, count, steps):
        """The unit of a window that is expected to have so many batches of this count, unless it has one; and whether
        it had none."""
        held = self.window_unit + 0.0
        fresh = scale / (count * ops.cast(steps, ms.float32))
        return ops.select(ops.logical_and(held == 0, count > 0), fresh, held), held == 0

    def after_micro_batch(self, sums):
        """Of a batch that Python cuts: other code may clear the device's flag between two micro-batches."""
        if saturates():
            sums = ops.depend(sums, ops.assign_add(self.saturated_batches, read_flag(sums)))
        return sums

    def end_batch(self, sums, count):
        """Keep a batch's sums (loss, count, dropped micro-batches), once all of its gradients are added."""
        kept = ops.assign(self.window_sums, self.window_sums + ops.concat((sums, ops.ones((1,), ms.float32))))
        if saturates():
            kept = ops.depend(kept, ops.assign_add(self.saturated_batches, read_flag(sums)))
        return ops.assign(self.batch_items, ops.depend(count, kept))

    def is_complete(self, after):
        """Whether the batch that `after` belongs to was the window's last."""
        position = ops.depend(self.window_position, after) + 0
        return ops.logical_and(position >= self.window_steps, self.updates_held == 0)

    def result(self, scale, after):
        """The window's gradients and loss, as `run` of other windows returns them, once `after` is there."""
        sums = ops.depend(self.window_sums, after) + 0.0
        # Not sums[3]: once two eager gradients have been interrupted, MindSpore knows no int as index any more.
        sums = ops.depend(sums, ops.assign(self.window_batches, ops.unstack(sums)[3]))
        return self.reduction(self.accumulators.read(sums), sums[:3], self.window_unit + 0.0, scale)

    def reset(self, after):
        """An empty window, once `after` is there."""
        cleared = self.accumulators.reset(after)
        cleared = ops.assign(self.window_position, ops.depend(ms.Tensor(0, ms.int32), cleared))
        cleared = ops.assign(self.window_unit, ops.depend(ms.Tensor(0.0, ms.float32), cleared))
        cleared = ops.assign(self.window_sums, ops.depend(ops.zeros((4,), ms.float32), cleared))
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
        """Keep its sums, and what it counted, as `end_batch` does, once all of its gradients are added."""
        *kept, items = sums.asnumpy()  # waits
        ended = self.window_sums.asnumpy() + np.array([*kept, 1], np.float32)
        overwrite(self.window_sums, ms.Tensor(ended))
        overwrite(self.batch_items, ms.Tensor(items))

    @property
    def batches(self) -> int:
        """Batches in the window."""
        return int(self.window_position.asnumpy())

    @property
    def is_full(self) -> bool:
        """What `is_complete` says."""
        full = self.batches >= int(self.window_steps.asnumpy())
        return full and not int(self.updates_held.asnumpy())

    def drop_if_torn(self) -> None:
        """After a batch that was begun and not ended, drop the window: what is in the accumulators of that batch cannot
        be told from the rest."""
        if self.batches == int(self.window_sums.asnumpy()[3]):
            return
        dropped = self.batches - 1
        self.reset_eagerly()
        if dropped > 0:
            warnings.warn(
                f"For '{self.owner}', a batch failed half-way, and with it the {dropped} batch(es) before it "
                f"in its window were dropped. The next batch begins a new window.",
                UserWarning,
                stacklevel=4,
            )

    def reset_eagerly(self) -> None:
        """An empty window."""
        self.accumulators.reset_eagerly()
        saturated = (self.saturated_batches,) if saturates() else ()
        for held in (self.window_position, self.window_unit, self.window_sums, *saturated):
            overwrite(held, ops.zeros_like(held))
        if self.records_noise:
            self.noise.reset_eagerly()

    def set_steps(self, accumulation_steps: int) -> None:
        """Let windows to come have so many batches."""
        overwrite(self.accumulation_steps, ms.Tensor(accumulation_steps, ms.int32))
