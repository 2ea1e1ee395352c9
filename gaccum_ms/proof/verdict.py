"""The proof: the loss of a few samples, or of micro-batches, is compared with that of all of them together.

a few samples, in two parts
    equal?                  the loss is what the options say
    else, or an error:      samples may belong together, as pairs do
micro-batches that training makes
    equal?                  nothing is known to be wrong, unless a remedy fits the samples and them
    else                    the loss is another; a remedy that fits both is named
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mindspore import nn

from gaccum_ms.backend.noise_of_rows import ReachesOtherRanks
from gaccum_ms.options.options import Options
from gaccum_ms.proof.broadcasting import broadcast_input
from gaccum_ms.proof.comparison import Comparison, Evaluation
from gaccum_ms.proof.remedies import remedies, splits_on_other_axes
from gaccum_ms.proof.rule import Inputs, Rule
from gaccum_ms.proof.samples import few, joined
from gaccum_ms.splitting.even_split import UNCUT, EvenSplit, cut_axes, rows_of

EQUAL, DIFFERENT, UNDECIDED, LATER = "equal", "different", "undecided", "later"
RANDOM = "the loss is random"
_MOST_MICRO_BATCHES = 4


class Verdict(NamedTuple):
    """`kind` : `LATER` , if only another batch can tell. `why` : what was measured, or why nothing was."""

    kind: str
    why: str
    remedy: str | None = None


@dataclasses.dataclass
class Batch:
    """What the proof evaluates. `samples` : of both parts, how many at most; 0: the inputs are not the network's, or
    nobody knows their samples. `whole` : the inputs, if they are all micro-batches together."""

    rule: Rule
    inputs: Inputs
    samples: int
    micro_batches: Callable[[], Sequence[Inputs]]
    whole: Inputs | None = None
    decides_among_micro_batches: bool = False  # whether these are compared, whatever the samples show


def judge(batch: Batch, evaluation: Evaluation) -> Verdict:
    """Compare, and try remedies."""
    comparison, why = _of_samples(batch, evaluation)
    if comparison is not None:
        if comparison.is_random:
            return Verdict(UNDECIDED, RANDOM)
        if not comparison.off.any() and not batch.decides_among_micro_batches:
            return _equal(comparison)
    parts = list(batch.micro_batches())
    if len(parts) < 2:
        return Verdict(LATER, why if comparison is None else _measured(comparison))
    group = None
    for group in _groups(batch, parts, evaluation):
        if group.is_random:
            return Verdict(UNDECIDED, RANDOM)
        if group.is_finite and group.off.any():
            break
    if group is None or not group.is_finite:
        return Verdict(UNDECIDED, "its losses are not finite")
    differ = [each for each in (group, comparison) if each is not None and each.off.any()]
    remedy = _remedy(differ, group)
    if not group.off.any() and remedy is None:
        return _equal(group, (why or "few samples show another loss") if batch.samples else "")
    if remedy is None:
        remedy = _of_inputs(batch, group, evaluation)
    return Verdict(DIFFERENT, _measured(differ[0]), remedy)


def _remedy(differ: Sequence[Comparison], group: Comparison) -> str | None:
    """The first that fits the samples, and holds for micro-batches; or fits these, as where samples belong together."""
    for comparison in reversed(differ):
        for remedy in remedies(comparison):
            if remedy.fits(comparison) and remedy.holds(group):
                return remedy.words
    return None


def _of_samples(batch: Batch, evaluation: Evaluation) -> tuple[Comparison | None, str]:
    if batch.samples < 2 or evaluation.rule.samples(batch.inputs) < 2:
        return None, "no few samples can be taken"
    for number, parts in enumerate(few(batch.inputs, batch.rule.axes, batch.samples)):
        inputs = [rows_of(batch.inputs, batch.rule.axes, places) for places in (*parts, np.concatenate(parts))]
        try:
            comparison = Comparison(evaluation, inputs[:2], inputs[2])
        except (ReachesOtherRanks, RecursionError):  # the second: MindSpore's, of a gradient within, in graph mode
            raise
        except Exception as error:  # samples may belong together, as pairs do
            return None, f"{type(error).__name__} with few samples"
        has_losses = comparison.is_finite and (np.isfinite(comparison.losses).all() or number > 2)
        if comparison.is_random or has_losses:
            return comparison, ""
    return None, "its losses are not finite"


def _groups(batch: Batch, parts: Sequence[Inputs], evaluation: Evaluation) -> Iterator[Comparison]:
    """Micro-batches to compare: of the first ones the two whose losses differ most, then neighbours."""
    if batch.whole is not None:
        yield Comparison(evaluation, parts, batch.whole, of_rows=False)
        return
    parts = parts[:_MOST_MICRO_BATCHES]
    pairs = list(zip(parts[::2], parts[1::2], strict=False))
    if len(parts) > 2:
        losses = [float(evaluation.rule.of_whole(evaluation.of(part)[0]).sum()) for part in parts]
        low, high = int(np.nanargmin(losses)), int(np.nanargmax(losses))
        pairs = [(parts[low], parts[high])] * (low != high) + pairs
    for pair in pairs:
        yield Comparison(evaluation, pair, joined(pair, evaluation.rule.axes))


def _equal(comparison: Comparison, why: str = "") -> Verdict:
    if not comparison.shows:
        return Verdict(UNDECIDED, "the losses of the parts are equal, so that nothing is seen")
    return Verdict(UNDECIDED if why else EQUAL, _measured(comparison) + (f"; {why}" if why else ""))


def _measured(comparison: Comparison) -> str:
    losses = ", ".join(map(_text, comparison.losses[:4])) + (", ..." if len(comparison.losses) > 4 else "")
    samples = map(comparison.rule.samples, comparison.parts[:4])
    return (
        f"parts of {', '.join(map(str, samples))} sample(s) have {losses}, of which the options make "
        f"{_text(comparison.made)}, and all of them together have {_text(comparison.whole)}"
    )


def _text(losses: np.ndarray) -> str:
    texts = [f"{loss:.6g}" for loss in np.ravel(losses)]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


# -- how the inputs are given ------------------------------------------------------------------------------------------


def _of_inputs(batch: Batch, group: Comparison, evaluation: Evaluation) -> str | None:
    """An input that is broadcast, or samples on another axis, or an input without samples."""
    if batch.whole is not None or batch.rule.options.returns_ratio or batch.rule.options.losses > 1:
        return None
    broadcast = broadcast_input(
        batch.rule.options,
        batch.rule.call,
        group.both,
        group.parts,
        lambda part: float(evaluation.of(part)[0].losses[0]),
        1e-4,
    )
    return broadcast or _on_other_axes(batch, evaluation) or _shared(batch, group, evaluation)


def _on_other_axes(batch: Batch, evaluation: Evaluation) -> str | None:
    if batch.rule.options.shared or not isinstance(batch.rule.call, nn.Cell):
        return None
    for axes, split in splits_on_other_axes(batch.inputs):
        if axes != batch.rule.axes:
            options = dataclasses.replace(batch.rule.options, split=split)
            places = next(few(batch.inputs, axes, batch.samples))
            parts = [rows_of(batch.inputs, axes, place) for place in (*places, np.concatenate(places))]
            if _makes_equal(options, axes, parts[:2], parts[2], evaluation):
                return f"split=EvenSplit(axis={split.axis})"
    return None


def _shared(batch: Batch, group: Comparison, evaluation: Evaluation) -> str | None:
    if batch.rule.options.splits_in_python or not isinstance(batch.rule.call, nn.Cell):
        return None
    for position in range(1, len(batch.inputs)):
        if evaluation.rule.axes[position] == UNCUT:
            continue
        shared = tuple(sorted((*batch.rule.options.shared, position)))
        split = dataclasses.replace(batch.rule.options.split or EvenSplit(), shared=shared)
        options = dataclasses.replace(batch.rule.options, split=split)
        axes = cut_axes(len(batch.inputs), options.shared, options.axis)
        parts = [
            [batch.inputs[position] if place == position else value for place, value in enumerate(part)]
            for part in group.parts
        ]
        if _makes_equal(options, axes, parts, joined(parts, axes), evaluation):
            return (
                f"gaccum_ms.WithBatchLossCell, if the loss compares samples; or, if input {position} has no entries of "
                f"samples, split=EvenSplit(shared={shared})"
            )
    return None


def _makes_equal(
    options: Options, axes: Sequence[int], parts: Sequence[Inputs], both: Inputs, evaluation: Evaluation
) -> bool:
    other = evaluation._replace(rule=Rule(options, evaluation.rule.call, tuple(axes)))
    try:
        comparison = Comparison(other, parts, both)
    except Exception:  # the network cannot run so
        return False
    return comparison.shows and not comparison.off.any() and bool((np.abs(comparison.whole) > 1e-3).all())
