"""What a checkpoint says about the run that saved it, beside weights and state: enough to go on with it, or to refuse.

A window that is open holds sums of one rank, in units of one rule. Loaded on another rank, or under another rule, they
would be counted twice or wrongly, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.accumulator import overwrite
from gaccum_ms.records import counter, of_this_rank

RULES = ("samples", "counts", "sums")  # what micro-batches weigh by


class Provenance(nn.Cell):
    """Who saved a checkpoint: Parameters that no graph uses, so that they are in every checkpoint of the step.

    Args:
        rule (str): What the window's micro-batches weigh by, one of `RULES` .
        accumulation_steps (int): The cell's own.
        distributed (bool): Whether there are other ranks.
    """

    def __init__(self, rule: str, accumulation_steps: int, distributed: bool) -> None:
        super().__init__(auto_prefix=False)
        self.own = (get_rank(), get_group_size(), RULES.index(rule)) if distributed else (0, 1, RULES.index(rule))
        self.own_steps = accumulation_steps
        self.window_origin = of_this_rank("window_origin", ms.Tensor(self.own, ms.int32))
        self.configured_steps = counter("configured_steps", accumulation_steps)
        self.epoch_batches = counter("epoch_batches")  # of the last ms.Model.train
        self.random_state = of_this_rank("random_state", ms.get_rng_state())

    def keep_random_state(self) -> None:
        """The default generator's state, for the next checkpoint."""
        self.random_state.set_data(ms.get_rng_state())

    def check_loaded(self, spans_batches: bool, batches: int) -> None:
        """`check` what a checkpoint left in the Parameters. `batches` : in the window that was loaded."""
        self.check(spans_batches, batches, self.window_origin.asnumpy(), int(self.configured_steps.asnumpy()))

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
                f"For 'TrainOneStepWithGradAccumulationCell', the checkpoint was saved in a window, {batches} "
                f"batch(es) after its beginning, which a step of single batches cannot finish, but got a checkpoint "
                f"with accumulation_steps={steps} and a cell with accumulation_steps={self.own_steps}. Load it by "
                f"gaccum_ms.resume, or give the cell accumulation_steps > 1."
            )
        if (rank, ranks) != self.own[:2]:
            raise ValueError(
                f"For 'TrainOneStepWithGradAccumulationCell', the checkpoint was saved in a window, whose sums are "
                f"those of one rank, but got the sums of rank {rank} of {ranks} on rank {self.own[0]} of "
                f"{self.own[1]}: they would be lost or counted twice. Give gaccum_ms.resume the checkpoints of all "
                f"{ranks} rank(s)."
            )
        if rule != self.own[2]:
            raise ValueError(
                f"For 'TrainOneStepWithGradAccumulationCell', a window must be finished by the rule that it began "
                f"with, but got a checkpoint whose micro-batches weigh by {RULES[rule]}, and a cell whose weigh by "
                f"{RULES[self.own[2]]}. Give 'count' and 'reduction' as they were, or load a checkpoint between two "
                f"windows."
            )

    def settle(self) -> bool:
        """Say from now on what this run is. Returns whether the saving cell had another `accumulation_steps` ."""
        differs = int(self.configured_steps.asnumpy()) != self.own_steps
        overwrite(self.window_origin, ms.Tensor(self.own, ms.int32))
        overwrite(self.configured_steps, ms.Tensor(self.own_steps, ms.int32))
        return differs
