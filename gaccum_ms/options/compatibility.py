"""Which options go together, and where: one table, the source of the errors and of the table in the docs."""

from __future__ import annotations

from typing import NamedTuple

from mindspore import nn

from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules_of_options import OF_OPTIONS
from gaccum_ms.options.rules_of_places import OF_PLACES


class Setup(NamedTuple):
    """The network and the options of a training."""

    o: Options  # a short name, because the table uses it everywhere
    network: nn.Cell
    compiler_distributes: bool = False  # in semi-auto or auto parallel mode

    @property
    def of_batch(self) -> bool:
        """Whether the loss needs the whole batch."""
        return isinstance(self.network, WithBatchLossCell)

    @property
    def sum_without_count(self) -> bool:
        """Whether the loss is a sum without a count of its items."""
        return self.o.reduction == "sum" and self.o.own_count is None


RULES = (*OF_OPTIONS, *OF_PLACES)


def refused(place: str, owner: str, setup: Setup) -> Exception | None:
    """The error of the first rule that refuses the setup at this place; None if all options go together."""
    first = next((rule for rule in RULES if rule.place == place and rule.refuses(setup)), None)
    return None if first is None else first.error(first.message(owner, setup))


def check(place: str, owner: str, setup: Setup) -> None:
    """Raise what `refused` returns."""
    error = refused(place, owner, setup)
    if error is not None:
        raise error
