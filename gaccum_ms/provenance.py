"""What a checkpoint says about the run that saved it, beside weights and state: enough to go on with it, or to refuse.

A window that is open holds sums of one rank, in units of one rule. Loaded on another rank, or under another rule, they
would be counted twice or wrongly, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.accumulator import overwrite
from gaccum_ms.open_window import OpenWindow
from gaccum_ms.records import counter, of_this_rank

RULES = ("samples", "counts", "sums")  # what micro-batches weigh by


class Provenance(nn.Cell):
    """Who saved a checkpoint: Parameters that no graph uses, so that they are in every checkpoint of the step.

    Args:
        owner (str): The class that errors name.
        rule (str or None): What the window's micro-batches weigh by, one of `RULES` ; None: each window's first batch
            decides.
        accumulation_steps (int): The cell's own.
        distributed (bool): Whether there are other ranks.
    """

    def __init__(self, owner: str, rule: str | None, accumulation_steps: int, distributed: bool) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.rule_is_fixed = rule is not None
        self.rule = rule or RULES[0]
        self.rank: int = get_rank() if distributed else 0
        self.ranks: int = get_group_size() if distributed else 1
        self.own_steps = accumulation_steps
        self.begun = False
        self.window_origin = of_this_rank("window_origin", ms.Tensor(self.origin, ms.int32))
        self.configured_steps = counter("configured_steps", accumulation_steps)
        self.epoch_batches = counter("epoch_batches")  # of the last ms.Model.train
        self.random_state = of_this_rank("random_state", ms.get_rng_state())

    @property
    def origin(self) -> tuple[int, int, int]:
        """This rank, the number of ranks, and the rule."""
        return self.rank, self.ranks, RULES.index(self.rule)

    def set_rule(self, rule: str) -> None:
        """What the window that begins weighs by."""
        self.rule = rule
        overwrite(self.window_origin, ms.Tensor(self.origin, ms.int32))

    def keep_random_state(self) -> None:
        """The default generator's state, for the next checkpoint."""
        self.random_state.set_data(ms.get_rng_state())

    def begin(self, window: OpenWindow | None, batches: int) -> None:
        """Before the first step: MindSpore may have loaded a checkpoint, and what cannot be gone on with is refused.

        Args:
            window (OpenWindow or None): The step's window, if it spans batches.
            batches (int): How many it holds by now.
        """
        steps = int(self.configured_steps.asnumpy())
        self.check(window is not None, batches, self.window_origin.asnumpy().tolist(), steps)
        self._settle(window)
        self.begun = True

    def load(self, cell: nn.Cell, values: Mapping[str, np.ndarray], window: OpenWindow | None) -> None:
        """Give `cell` what a checkpoint holds, by name; `resume` has checked it. What a checkpoint of another kind of
        training lacks must not stay from before: windows and counts begin anew."""
        values = {"batch_count": np.array(0), "update_count": np.array(0), **values}
        if window is not None:
            window.forget()
            values = window.accumulators.adapt(values)
        for parameter in cell.get_parameters():
            if parameter.name in values:
                overwrite(parameter, ms.Tensor(values[parameter.name], parameter.dtype))
        if "random_state" in values:
            ms.set_rng_state(ms.Tensor(values["random_state"], ms.uint8))
        self._settle(window)

    def check(self, spans_batches: bool, batches: int, origin: Sequence[int], steps: int) -> None:
        """Refuse a window that cannot be finished here.

        Args:
            spans_batches (bool): Whether the step has windows of several batches.
            batches (int): Batches in the saved window.
            origin (Sequence[int]): Its `window_origin` .
            steps (int): The `accumulation_steps` of the cell that saved it.

        Raises:
            ValueError: If it cannot.
        """
        rank, ranks, rule = (int(value) for value in origin)
        if not batches:
            return
        if not spans_batches:
            raise ValueError(
                f"For '{self.owner}', the checkpoint was saved in a window, {batches} "
                f"batch(es) after its beginning, which a step of single batches cannot finish, but got a checkpoint "
                f"with accumulation_steps={steps} and a cell with accumulation_steps={self.own_steps}. Load it by "
                f"gaccum_ms.resume, or give the cell accumulation_steps > 1."
            )
        if (rank, ranks) != (self.rank, self.ranks):
            raise ValueError(
                f"For '{self.owner}', the checkpoint was saved in a window, whose sums are "
                f"those of one rank, but got the sums of rank {rank} of {ranks} on rank {self.rank} of "
                f"{self.ranks}: they would be lost or counted twice. Give gaccum_ms.resume the checkpoints of all "
                f"{ranks} rank(s)."
            )
        if self.rule_is_fixed and RULES[rule] != self.rule:
            raise ValueError(
                f"For '{self.owner}', a window must be finished by the rule that it began "
                f"with, but got a checkpoint whose micro-batches weigh by {RULES[rule]}, and a cell whose weigh by "
                f"{self.rule}. Give 'count' and 'reduction' as they were, or load a checkpoint between two "
                f"windows."
            )

    def _settle(self, window: OpenWindow | None) -> None:
        """Say from now on what this run is. Its own number of batches comes next, if the saving cell had another."""
        if not self.rule_is_fixed:
            self.rule = RULES[int(self.window_origin.asnumpy()[2])]
        if window is not None:
            overwrite(window.updates_held, ms.Tensor(0, ms.int32))
            if int(self.configured_steps.asnumpy()) != self.own_steps:
                window.set_steps(self.own_steps)
        overwrite(self.window_origin, ms.Tensor(self.origin, ms.int32))
        overwrite(self.configured_steps, ms.Tensor(self.own_steps, ms.int32))
