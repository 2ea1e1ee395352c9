"""Remedies for a cell whose update is not the whole batch's: each is tried on the batch, and the first that makes the
updates equal is named.

A count is first judged by losses alone: a weighted mean of the micro-batches' losses must be the whole batch's. Those
that pass, and what cannot be judged so, run one update.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.auditing.evidence import Evidence, Update
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.counts import CountSamples
from gaccum_ms.proof.remedies import RATIO, counted, known_counts, splits_on_other_axes
from gaccum_ms.splitting.even_split import EvenSplit

_MOST_TRIED = 16  # updates, each of which may compile a graph


class Trial(NamedTuple):
    """A cell to train with once."""

    remedy: str
    cell: GradAccumulationCell


def find_remedy(
    evidence: Evidence,
    cell: GradAccumulationCell,
    batch: Sequence[ms.Tensor],
    micro_batches: Sequence[Sequence[ms.Tensor]],
    loss_of: Callable[[Sequence[ms.Tensor]], float],
    train: Callable[[GradAccumulationCell], Update],
) -> str | None:
    """The first remedy that makes the updates equal; None if there is none among those known. `loss_of` : the
    network's loss on a micro-batch; `train` : one update with a cell on the batch."""
    trials: Iterator[Trial | str] = itertools.chain(
        _counts(evidence, cell, batch, micro_batches, loss_of) if cell.loss_is_mean and not cell.several_losses else (),
        _shared(cell, batch),
        _axes(cell, batch),
        _of_batch(cell),
    )
    for trial in itertools.islice(trials, _MOST_TRIED):
        if isinstance(trial, str):
            return trial
        try:
            if evidence.agrees(train(trial.cell)):
                return trial.remedy
        except Exception:  # the network cannot run so, in one of MindSpore's many ways
            continue
    return None


# -- what to count -----------------------------------------------------------------------------------------------------


def _counts(
    evidence: Evidence,
    cell: GradAccumulationCell,
    batch: Sequence[ms.Tensor],
    micro_batches: Sequence[Sequence[ms.Tensor]],
    loss_of: Callable[[Sequence[ms.Tensor]], float],
) -> Iterator[Trial | str]:
    """Counts with which the micro-batches' losses have the whole batch's as their mean. A str needs no update: with it,
    the losses have it as their ratio."""
    try:
        losses = np.array([[loss_of(micro_batch)] for micro_batch in micro_batches])
    except Exception:  # the network cannot run on them
        return
    for name, count in known_counts(cell.own_count, cell.network, batch):
        mean, ratio = (counted(losses, micro_batches, count, least) for least in (0, 1))
        if mean is not None and evidence.agrees_on_loss(mean.item()):
            count_of_loss = None if isinstance(count, CountSamples) else count
            yield Trial(name, cell.with_options(count=count_of_loss))
        elif ratio is not None and evidence.agrees_on_loss(ratio.item()):
            yield RATIO.format(count="what 'count' counts" if count is cell.own_count else name)


# -- how to cut --------------------------------------------------------------------------------------------------------


def _shared(cell: GradAccumulationCell, batch: Sequence[ms.Tensor]) -> Iterator[Trial]:
    """Inputs that belong to each micro-batch as a whole."""
    if cell.splits_in_python:
        return
    others = [position for position in range(1, len(batch)) if position not in cell.shared]
    for more in itertools.chain(itertools.combinations(others, 1), itertools.combinations(others, 2)):
        shared = tuple(sorted((*cell.shared, *more)))
        split = dataclasses.replace(cell.split or EvenSplit(), shared=shared)
        meaning = (
            f"Each micro-batch then sees the whole of input(s) {', '.join(map(str, more))}: share only what has no "
            f"entries of samples"
        )
        yield Trial(f"split=EvenSplit(shared={shared}). {meaning}", cell.with_options(split=split))


def _axes(cell: GradAccumulationCell, batch: Sequence[ms.Tensor]) -> Iterator[Trial]:
    """Inputs whose samples are on axis 1, such as sequences with time in front."""
    if cell.splits_in_python or cell.shared:
        return
    for _, split in splits_on_other_axes(batch):
        yield Trial(f"split=EvenSplit(axis={split.axis})", cell.with_options(split=split))


# -- a loss of the whole batch -----------------------------------------------------------------------------------------


def _of_batch(cell: GradAccumulationCell) -> Iterator[Trial]:
    network = cell.network
    if isinstance(network, nn.WithLossCell) and not (cell.several_losses or cell.splits_in_python):
        of_batch = WithBatchLossCell(_WithLabels(network._backbone), network._loss_fn)
        sizes = {name: getattr(cell.options, name) for name in ("micro_size", "micro_batch_size", "split", "jit")}
        yield Trial("WithBatchLossCell(backbone, loss)", GradAccumulationCell(of_batch, **sizes))


class _WithLabels(nn.Cell):
    """A backbone that passes the labels on to the loss."""

    def __init__(self, backbone: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.backbone = backbone

    def construct(self, data, labels):
        return self.backbone(data), labels
