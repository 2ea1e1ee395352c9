"""Options that the table does not refuse go together: each pair is compiled, and trains.

The pairs are made from the fields of `Options` , so that a new option fails here until it has values.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import ClipByValue, EvenSplit, GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.options.compatibility import Setup, refused
from gaccum_ms.options.options import Options, checked
from gaccum_ms.options.rules import CELL

ROWS = 5  # of a batch: three and two in two micro-batches


def in_two(x, y):
    return [(x[:2], y[:2]), (x[2:], y[2:])]


def count(x, y):
    return (x[:, 0] > -9).sum()


AUTO = {"micro_batch_size": "auto"}
# For each field: what a user may give, with all that it needs.
VALUES: dict[str, list[dict[str, Any]]] = {
    "micro_size": [{"micro_size": 2}],
    "micro_batch_size": [{"micro_batch_size": 3}, AUTO],
    "accumulation_steps": [{"accumulation_steps": 2}],
    "reduction": [{"reduction": "sum"}, {"reduction": "ratio"}],
    "count": [{"count": count}],
    "min_count": [{"min_count": 9.0, "count": count}, {"min_count": 9.0, "reduction": "ratio"}],
    "loss_weights": [{"loss_weights": (1.0, 0.5)}],
    "max_grad_norm": [{"max_grad_norm": 0.5}],
    "transforms": [{"transforms": (ClipByValue(0.5),)}],
    "accumulator_dtype": [{"accumulator_dtype": ms.bfloat16}, {"accumulator_dtype": ms.float16}],
    "compensated": [{"compensated": True}],
    "overflow": [{"overflow": "drop_micro_batch"}],
    "shard_accumulators": [{"shard_accumulators": True}],
    "record_noise": [{"record_noise": True}],
    "aux": [{"aux": True}],
    "memory_limit": [{"memory_limit": 2**40, **AUTO}],
    "is_out_of_memory": [{"is_out_of_memory": is_out_of_memory, **AUTO}],
    "jit": [{"jit": True}],
    "split": [{"split": EvenSplit(shared=(1,))}, {"split": in_two}],
}
PAIRS = [
    {**one, **other}
    for first, second in itertools.combinations(VALUES, 2)
    for one, other in itertools.product(VALUES[first], VALUES[second])
    if not any(one[name] != other[name] for name in one.keys() & other.keys())
]
QUICK = (
    {"accumulator_dtype": ms.bfloat16, "record_noise": True},
    {"accumulator_dtype": ms.bfloat16, "micro_size": 2},
    {"aux": True, "accumulation_steps": 2},
    {"overflow": "drop_micro_batch", "transforms": VALUES["transforms"][0]["transforms"]},
)


class Network(nn.Cell):
    """Returns what the options ask for."""

    def __init__(self, ratio, losses, aux):
        super().__init__()
        self.dense = nn.Dense(3, 1, "ones", "zeros")
        self.ratio, self.losses, self.aux = ratio, losses, aux

    def construct(self, x, y):
        errors = ops.square(self.dense(x) - y)
        loss = errors.sum() if self.ratio else errors.mean()
        outputs: tuple = (loss,)
        if self.ratio:
            outputs = (*outputs, errors.shape[0])
        if self.losses > 1:
            outputs = (*outputs, loss * 2)
        if self.aux:
            outputs = (*outputs, x[:, 0])
        return outputs if len(outputs) > 1 else loss


def named(options):
    return "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())


def complete(options):
    """With a size, if the pair has none."""
    has_size = {"micro_size", "micro_batch_size"} & options.keys() or callable(options.get("split"))
    return options if has_size else {**options, "micro_size": 2}


def trains(options):
    """Whether the options are accepted; then they must train."""
    options = complete(options)
    network = Network(options.get("reduction") == "ratio", len(options.get("loss_weights", (1,))), "aux" in options)
    if "loss_weights" in options and "count" in options:
        options = {**options, "count": (count, count)}
    given = Options(**{"loss_weights": None, **options})
    error: Exception | None = None
    try:
        error = refused(CELL, "GradAccumulationCell", Setup(checked(given), network))
    except ValueError as wrong:  # a size, and a function that makes micro-batches
        assert callable(options.get("split")) or {"micro_size", "micro_batch_size"} <= options.keys(), options
        error = wrong
    if error is not None:
        with pytest.raises(type(error)) as raised:
            GradAccumulationCell(network, **options)
        assert str(raised.value) == str(error)
        return False
    if "transforms" in options:  # each belongs to one step
        options = {**options, "transforms": (ClipByValue(0.5),)}
    cell = GradAccumulationCell(network, **options)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(network.trainable_params(), 0.01)).set_train()
    if cell.finds_size:
        step._auto.rehearse(3)  # in place of a search
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    y = np.ones((1 if isinstance(options.get("split"), EvenSplit) else ROWS, 1), np.float32)
    for _ in range(2):
        outputs = step(Tensor(x), Tensor(y))
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    assert np.isfinite(loss.asnumpy()), options
    assert int(step.update_count.asnumpy()) == 2 // options.get("accumulation_steps", 1), options
    weight = network.dense.weight.asnumpy()
    assert np.isfinite(weight).all(), options
    assert (weight != 1).any(), options
    return True


def test_each_option_has_values():
    assert list(VALUES) == [field.name for field in dataclasses.fields(Options)]


@pytest.mark.parametrize("options", QUICK, ids=named)
def test_these_pairs_train(options):
    assert trains(options)


@pytest.mark.thorough
@pytest.mark.parametrize("first", list(VALUES))
def test_each_pair_trains_or_is_refused_by_the_table(first):
    """All pairs of an option with those after it: a process compiles many small graphs."""
    found = [trains(pair) for pair in PAIRS if next(name for name in VALUES if name in pair) == first]
    assert not found or any(found)
