"""The life of a training step or an accumulator: it begins to train, is saved, and is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.graphs import runs_eagerly
from gaccum_ms.backend.newer_optimizers import list_rates, refuse_changed_settings, refuse_uncompiled, settings_of
from gaccum_ms.backend.storage import keep_in_place, parameters_of
from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer, whole_state
from gaccum_ms.training.compiled_state import lost_state, refuse_lost_state
from gaccum_ms.transforms.weight_average import WeightAverage

if TYPE_CHECKING:
    from gaccum_ms.accumulation.open_window import OpenWindow
    from gaccum_ms.accumulation.update import Update
    from gaccum_ms.record.run_record import RunRecord


class Lifecycle:
    """What precedes training, saving and loading. `position` : batches in the open window, also of a checkpoint's, if
    windows have one batch here. `named` : has the Parameters that MindSpore's own step or loop has, at their places."""

    def __init__(
        self,
        record: RunRecord,
        update: Update,
        open_window: OpenWindow | None,
        position: ms.Parameter,
        jit: bool,
        named: nn.Cell,
    ) -> None:
        self._record = record
        self._update = update
        self.average = next((link for link in update.links if isinstance(link, WeightAverage)), None)
        self._open_window = open_window
        self._position = position
        self._jit = jit
        self._named = named
        self._settings: list[dict[str, Any]] | None = None  # of the optimizer's groups, when it was compiled
        self._may_lose_state = True

    def refresh_names(self) -> None:
        """If two Parameters share a name, name all by their places, as MindSpore does before a Cell's first call: of
        two that share one, a checkpoint holds one. In our step weights, network and optimizer have other places than in
        MindSpore's own; and what is ours keeps its names, by which `resume` finds it."""
        self._named.check_names_and_refresh_name()

    def begin_call(self) -> None:
        """Before each batch, flush and other change: refuse what cannot be trained or continued."""
        if self.average is not None and self.average.swapped:
            raise RuntimeError(
                f"For '{self._record.owner}', there must be no training within 'averaged_weights()', where the weights "
                f"are their averages, but got a batch or a flush. Nothing was changed. Train after its end."
            )
        if runs_eagerly(self._jit):
            refuse_uncompiled(self._record.owner, self._update.optimizer)
        if not self._record.begun or self._record.loaded:
            self.refresh_names()
            self._record.begin(self._open_window, int(self._position.asnumpy()))

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the weights have the values of their averages."""
        if self.average is None:
            raise ValueError(
                f"For '{self._record.owner}', 'averaged_weights' needs averages, but got none among 'transforms'. Give "
                f"transforms=(..., WeightAverage(0.9999))."
            )
        return self.average.in_place_of_weights()

    def begin_batch(self) -> None:
        """The same before a batch or a flush, which may be compiled with the settings that the optimizer has now."""
        self.begin_call()
        if runs_eagerly(self._jit):
            return
        self.refuse_lost_state()
        if self._settings is None:
            self._settings = settings_of(self._update.optimizer)
        refuse_changed_settings(self._record.owner, self._update.optimizer, self._settings)

    def refuse_lost_state(self) -> None:
        """Before the update is compiled, once."""
        if self._may_lose_state and not runs_eagerly(self._jit):
            refuse_lost_state(self._record.owner, lost_state(self._update))
            self._may_lose_state = False

    def keep_in_place(self, cell: nn.Cell) -> None:
        """Make compiled graphs see writes into the Parameters of `cell` , also graphs of which it becomes a part. What
        this changes in the user's objects is undone when `cell` goes."""
        list_rates(cell, self._update.optimizer)
        accumulators = self._open_window.accumulators.get_parameters() if self._open_window is not None else ()
        keep_in_place(cell, [self._record.window_origin, *accumulators], self._record.note_load)
        keep_in_place(cell, parameters_of(cell))

    def prepare_save(self) -> None:
        """Before a checkpoint is saved: copy state outside of Parameters into them, which no two may share a name."""
        self.refresh_names()
        self._record.keep_state()
        if isinstance(self._update.optimizer, ShardedOptimizer):
            self._update.optimizer.prepare_save()

    def load(self, cell: nn.Cell, values: Mapping[str, np.ndarray]) -> None:
        """Load a checkpoint's values into the Parameters of `cell` , by name; `gaccum_ms.resume` has checked them."""
        with whole_state(self._update.optimizer):
            for link in self._update.links:
                link.begin_anew()
            self._record.load(cell, values, self._open_window)
