"""The proof at the first batch of a training, once: when it is made, when it is left out, and what it says.

Each rank proves by itself, and reaches no collective. What cannot be seen at the first call, as with losses that are
equal, is looked at again at the second, fourth and eighth.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.noise_of_rows import ReachesOtherRanks, noise_of_rows
from gaccum_ms.backend.without_effect import CannotPutBack, too_large_to_copy, without_effect
from gaccum_ms.distributed.ranks import group_size_or_1
from gaccum_ms.layers.batchnorm import batch_norm_names, layers_with_statistics
from gaccum_ms.layers.dropout import dropouts
from gaccum_ms.layers.state import advice_about_state
from gaccum_ms.options.options import Options
from gaccum_ms.proof.comparison import Evaluation, computes_in_16_bits
from gaccum_ms.proof.rule import Inputs, Rule
from gaccum_ms.proof.samples import are_rows_of
from gaccum_ms.proof.verdict import DIFFERENT, EQUAL, LATER, RANDOM, UNDECIDED, Batch, Verdict, judge

VARIABLE = "GACCUM_MS_CHECK"
_CALLS = (1, 2, 4, 8)
_SAMPLES = 5
# Multiplications of a forward, as far as Parameters and tokens tell them, that a proof may take.
_MOST_WORK = {"CPU": 2**37}
_MOST_WORK_ON_DEVICES = 2**45
_MOST_OF_MICRO_BATCH = 8  # how many times as large a batch may be that is evaluated whole
_SKIPPED = "skipped"

_COMPARES = (
    "No sum and no known count explains it. If the loss compares samples, or is a function of a mean, as a root is, "
    "{of_batch} is exact; if it is a mean over other items than samples, {count}."
)


class _LeftOut(Exception):
    """Why nothing is measured."""


class FirstBatch:
    """The proof of one training. `function` : the network, or the function of a loop; `networks` : those in it;
    `is_asked_for` : by a user, in spite of the options and of the environment."""

    def __init__(
        self,
        owner: str,
        function: Callable[..., Any],
        networks: Sequence[nn.Cell],
        options: Options,
        is_asked_for: bool = False,
    ) -> None:
        self._owner = owner
        self._function = function
        self._networks = networks
        self._options = options
        self._calls = 0
        # An earlier batch, which only another one can tell about, and its count, where a loop gives numbers.
        self._before: tuple[Inputs, float | None] | None = None
        self.verdict = Verdict(UNDECIDED, "no batch has been seen")
        if is_asked_for:
            return
        if options.check is None:
            self.skip("check=None")
        elif os.environ.get(VARIABLE, "").lower() == "none":
            self.skip(f"{VARIABLE}=none")

    def __str__(self) -> str:
        """For a user who asks what was proved."""
        kind, why, remedy = self.verdict
        return f"{'undecided' if kind == LATER else kind}: {why}" + (f"; {remedy}" if remedy else "")

    @property
    def is_over(self) -> bool:
        too_late = self._calls > _CALLS[-1] and not self.waits
        return too_late or self.verdict.kind in (EQUAL, DIFFERENT, _SKIPPED)

    @property
    def told(self) -> bool:
        """Whether it has said that the loss is another."""
        return self.verdict.kind == DIFFERENT

    @property
    def waits(self) -> bool:
        """Whether the next batch decides."""
        return self._before is not None

    @property
    def is_decided(self) -> bool:
        """Whether numbers have shown what the loss is."""
        return self.verdict.kind in (EQUAL, DIFFERENT)

    def skip(self, why: str, so_far: bool = False) -> None:
        """Leave the proof out, unless a batch has been looked at. `so_far` : until Python gives one."""
        if not self.is_over and not self._calls:
            self.verdict = Verdict(UNDECIDED if so_far else _SKIPPED, why)

    def look(
        self,
        inputs: Inputs,
        axes: Sequence[int] | None,
        micro_batches: Callable[[], Sequence[Inputs]],
        count: float | None = None,
    ) -> str | None:
        """Look at a batch; returns what is to be said. `axes` : those of samples; None: the inputs are a function's of
        the user's, and not the network's. `count` : the batch's, if a loop gives it; nobody knows that of a few
        samples."""
        self._calls += 1
        if self.is_over or (self._before is None and self._calls not in _CALLS):
            return None
        earlier, self._before = self._before, None
        try:
            self.verdict = self._proved(inputs, axes, micro_batches, earlier, count)
        except (_LeftOut, CannotPutBack, ReachesOtherRanks) as reason:
            self.verdict = Verdict(_SKIPPED, str(reason))
        except Exception as error:  # the network cannot run so, in one of MindSpore's many ways; training goes on
            self.verdict = Verdict(_SKIPPED, f"{type(error).__name__}: {str(error).strip()[:200]}")
        if self.verdict.kind == LATER and earlier is None and axes is not None:
            self._before = list(inputs), count
        is_unexplained = self.verdict.kind == DIFFERENT and self.verdict.remedy is None
        # Two batches together may be no batch; and what construct writes has an advice of its own.
        if is_unexplained and (earlier is not None or self._writes_state()):
            self.verdict = self.verdict._replace(kind=UNDECIDED)
        return self._text() if self.verdict.kind == DIFFERENT else None

    def _writes_state(self) -> bool:
        return any(advice_about_state(network) is not None for network in self._networks)

    def _proved(
        self,
        inputs: Inputs,
        axes: Sequence[int] | None,
        micro_batches: Callable[[], Sequence[Inputs]],
        earlier: tuple[Inputs, float | None] | None,
        count: float | None,
    ) -> Verdict:
        batch = self._batch(inputs, axes, micro_batches)
        if count is not None:
            batch.samples = 0
        if earlier is not None:
            before, count_before = earlier
            batch.decides_among_micro_batches = True
            if len(micro_batches()) < 2:
                batch.micro_batches, batch.whole = functools.partial(list, [before, inputs]), None
            if (count is None) != (count_before is None):
                raise _LeftOut("some calls give a count, and some do not")
            if count is not None and count_before is not None:
                count_of = _count_of(before, count_before, inputs, count)
                batch.rule.options = dataclasses.replace(self._options, count=count_of)
        for network in self._networks:
            for parameter in network.get_parameters():
                if parameter.has_init:
                    parameter.init_data()
        verdict = self._judged(batch, _layers_with_modes)
        return verdict if verdict.why != RANDOM else self._judged(batch, _all_cells)

    def _judged(self, batch: Batch, in_evaluation: Callable[[nn.Cell], Sequence[nn.Cell]]) -> Verdict:
        off = [cell for network in self._networks for cell in in_evaluation(network)]
        left_out = too_large_to_copy(self._networks, self._writes_state)
        with (
            without_effect(self._function, self._networks, left_out, off) as put_back,
            noise_of_rows(group_size_or_1() > 1) as noise,
        ):
            if any(batch_norm_names(network, as_now=True) for network in self._networks):
                raise _LeftOut("a BatchNorm layer has no evaluation mode")
            return judge(batch, Evaluation(batch.rule, noise, put_back, self._tolerance(batch.inputs)))

    def _tolerance(self, inputs: Inputs) -> float:
        weights = [weight.dtype for network in self._networks for weight in network.trainable_params()]
        dtypes = [*weights, *(value.dtype for value in inputs if isinstance(value, ms.Tensor))]
        return 3e-3 if computes_in_16_bits(self._networks, dtypes) else 1e-4

    def _batch(
        self, inputs: Inputs, axes: Sequence[int] | None, micro_batches: Callable[[], Sequence[Inputs]]
    ) -> Batch:
        """What is evaluated."""
        options, whole = self._options, None
        samples = _SAMPLES if axes is not None else 0
        most_work = _MOST_WORK.get(ms.get_context("device_target"), _MOST_WORK_ON_DEVICES)
        if samples and self._work(inputs, axes, 2 * samples) > most_work:
            samples = 2
            if self._work(inputs, axes, 2 * samples) > most_work:
                raise _LeftOut("a forward takes too long")
        if options.splits_in_python:
            parts = micro_batches()
            sizes, size = [_size(part) for part in parts], _size(inputs)
            if len(parts) > 1 and size > _MOST_OF_MICRO_BATCH * max(sizes):
                if axes is None:
                    raise _LeftOut("the batch is too large to be evaluated whole")
                micro_batches = list
            elif axes is None and not are_rows_of(parts, inputs):
                raise _LeftOut("its function makes other samples of the batch")
            whole = inputs
        rule = Rule(options, self._function, tuple(axes) if axes is not None else (0,) * len(inputs))
        return Batch(rule, inputs, samples, micro_batches, whole)

    def _work(self, inputs: Inputs, axes: Any, samples: int) -> int:
        entries = sum(parameter.size for network in self._networks for parameter in network.get_parameters())
        tokens = [
            value.size // max(value.shape[axis], 1)
            for value, axis in zip(inputs, axes, strict=True)
            if isinstance(value, ms.Tensor) and value.ndim > axis >= 0 and value.dtype in (ms.int32, ms.int64)
        ]
        return entries * samples * max(tokens, default=1)

    def _text(self) -> str:
        _, why, remedy = self.verdict
        in_loop = self._owner == "GradAccumulator"
        text = f"For '{self._owner}', the loss is not what the options say, as measured on the loss: {why}. "
        if remedy is not None:
            text += f"This was tried, and makes it equal: {_in_loop(remedy) if in_loop else remedy}."
        else:
            text += _COMPARES.format(
                of_batch="gaccum_ms.WithBatchLossCell" + " in a GradAccumulationCell" * in_loop,
                count="give it as the accumulator's 'count'" if in_loop else "give it as count=",
            )
        return text + " gaccum_ms.audit shows what it does to gradients; check=None leaves this measurement out."


def _in_loop(remedy: str) -> str:
    """The words for a loop."""
    if remedy.startswith("count=") and remedy != "count=None":
        return f"a count for each call, accumulator(gradients, gaccum_ms.{remedy.removeprefix('count=')}(*batch))"
    return remedy


def _count_of(before: Inputs, count_before: float, inputs: Inputs, count: float) -> Callable[..., float]:
    """The count of two batches of a loop: of each, known by its own Tensors, and of both together."""
    counts = {tuple(map(id, before)): count_before, tuple(map(id, inputs)): count}
    return lambda *part: counts.get(tuple(map(id, part)), count_before + count)


def _layers_with_modes(network: nn.Cell) -> list[nn.Cell]:
    return [*dropouts(network).values(), *layers_with_statistics(network)]


def _all_cells(network: nn.Cell) -> list[nn.Cell]:
    return [cell for _, cell in network.cells_and_names()]


def _size(inputs: Inputs) -> int:
    return max((value.size for value in inputs if isinstance(value, ms.Tensor)), default=0)
