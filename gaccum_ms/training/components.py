"""The components of a training step, as its runners get them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.parameters import overwrite

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update, WindowEnd
    from gaccum_ms.options.options import Options


@dataclass(frozen=True)
class Components:
    """What a training step is made of. If `window` spans batches, `end_window` updates at its end."""

    options: Options
    network: nn.Cell
    weights: ms.ParameterTuple
    window: Any  # a Window, or an UnrolledWindow
    update: Update
    end_window: WindowEnd | None
    batch_count: ms.Parameter  # batches seen
    window_position: ms.Parameter  # batches in the open window
    check_inputs: Callable[[int], None]  # refuses a batch of another number of inputs than the network takes

    @property
    def spans_batches(self) -> bool:
        """Whether windows may have several batches."""
        return self.end_window is not None

    @property
    def is_between_windows(self) -> bool:
        """Whether no window is open."""
        return not int(self.window_position.asnumpy())

    def count_batch(self) -> None:
        """Count a batch that Python trained on."""
        overwrite(self.batch_count, self.batch_count + 1)
