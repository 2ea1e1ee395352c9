"""What a step says about its network at the first run, with a remedy. That remedies are exact: test_remedies.py."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    CountNotIgnored,
    GradAccumulationCell,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    WithBatchLossCell,
)
from gaccum_ms.backend.code_of_cells import named_cells
from tests.support import reference
from tests.support.reference import FEATURES, Regression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, FEATURES)).astype(np.float32)
WEIGHTS = Tensor(np.array([1.0, 5.0, 20.0], np.float32))
LABELS = np.array([0, 0, 0, 1, 0, 2, 1, 2], np.int32)
IGNORED = np.where([1, 1, 0, 0, 1, 0, 0, 0], -100, LABELS).astype(np.int32)
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]


def dense(outputs=3):
    weight = np.linspace(-1, 1, outputs * FEATURES).reshape(outputs, FEATURES).astype(np.float32)
    return nn.Dense(FEATURES, outputs, weight_init=Tensor(weight), bias_init="zeros")


def make_step(network, **options):
    return reference.make_step(network, **(options or {"micro_size": 4}))


def told_of(call, *batches) -> list[str]:
    """The texts of all warnings in these calls, which have the lines of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            call(*map(Tensor, batch))
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def told(step, *batch) -> list[str]:
    return told_of(step, batch, batch)


def without_ignored(x, y):
    return [(x[number : number + 1], y[number : number + 1]) for number in range(len(x)) if int(y[number]) >= 0]


class Functional(nn.Cell):
    """A loss that the code of a Cell calls as a function."""

    def __init__(self):
        super().__init__()
        self.net = dense()

    def construct(self, x, y):
        return ops.cross_entropy(self.net(x), y)


class Shifted(nn.Cell):
    """A language model with labels at the front, shifted inside."""

    def __init__(self):
        super().__init__()
        table = np.linspace(-1, 1, 44).reshape(11, 4).astype(np.float32)
        self.embedding = nn.Embedding(11, 4, embedding_table=Tensor(table))
        self.head = nn.Dense(4, 11, weight_init=Tensor(table[::-1].copy()), bias_init="zeros")
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens, labels):
        logits = self.head(self.embedding(tokens))[:, :-1]
        return self.loss(logits.reshape((-1, 11)), labels[:, 1:].reshape((-1,)))


def of_classes(**options):
    return nn.WithLossCell(dense(), nn.CrossEntropyLoss(**options))


TOKENS = RANDOM.integers(1, 11, size=(8, 7)).astype(np.int32)
PADDED = np.where(np.arange(7) < [[7], [2], [2], [7], [3], [1], [4], [7]], TOKENS, -100).astype(np.int32)
ALIKE = np.where(np.arange(7) < 1, -100, TOKENS).astype(np.int32)


@pytest.mark.parametrize(
    ("network", "labels", "options", "said"),
    [
        (of_classes(weight=WEIGHTS), LABELS, {"count": CountNotIgnored()}, "CountClassWeights(weight)"),
        (of_classes(weight=WEIGHTS, ignore_index=2), LABELS, {}, "CountClassWeights(weight, 2)"),
        (nn.WithLossCell(dense(), nn.NLLLoss()), IGNORED, {}, "count=gaccum_ms.CountNotIgnored();"),
        (nn.WithLossCell(dense(), nn.RMSELoss()), ONE_HOT, {}, "gaccum_ms.WithBatchLossCell(backbone, loss)"),
        (Functional(), IGNORED, {}, "'ops.cross_entropy' is a mean over the labels that are not -100"),
        (Shifted(), PADDED, {}, "CountNotIgnored(); with shift=1"),
        # No false alarm: nothing is ignored, or by all alike; a sum, the user's own count, probabilities as labels.
        (Functional(), LABELS, {}, None),
        (Shifted(), ALIKE, {}, None),
        (of_classes(weight=WEIGHTS, reduction="sum"), LABELS, {"reduction": "sum"}, None),
        (of_classes(weight=WEIGHTS), LABELS, {"count": lambda x, y: 1.0}, None),
        (of_classes(weight=WEIGHTS), ONE_HOT, {}, None),
        (nn.WithLossCell(dense(), nn.DiceLoss()), ONE_HOT, {"micro_size": 1}, None),
        # The network gets what a function makes of the batch.
        (of_classes(), IGNORED, {"micro_size": None, "split": without_ignored}, None),
    ],
)
def test_the_remedy_fits_the_loss(network, labels, options, said, pynative):
    step = make_step(network, **{"micro_size": 4, **options}, check=None)
    texts = told(step, TOKENS if labels.shape == TOKENS.shape else X, labels)
    assert len(texts) == (said is not None), texts
    assert all(said in text for text in texts)


def closure(net, loss):
    return lambda x, y: loss(net(x), y)


FUNCTIONS = [
    lambda: of_classes().construct,
    lambda: closure(dense(), nn.CrossEntropyLoss()),
    lambda: closure(dense(), ops.cross_entropy),
]


def told_in_a_loop(function, *batches, counts=None) -> list[str]:
    """The texts of all warnings while a loop trains on the batches, in windows of two."""
    weights = [weight for cell in named_cells(function).values() for weight in cell.trainable_params()]
    accumulator = GradAccumulator(nn.SGD(weights, 0.1), 2, jit=False, check=None)
    grad_fn = accumulator.value_and_grad(function)
    return told_of(lambda *batch: accumulator(grad_fn(*batch)[1], counts and counts(*batch)), *batches)


@pytest.mark.parametrize("make", FUNCTIONS, ids=["method of a network", "closure", "function"])
def test_a_loop_is_told_of_ignored_labels_as_the_cell_is(make, pynative):
    halves = [(X[:4], IGNORED[:4]), (X[4:], IGNORED[4:])]
    (text,) = told_in_a_loop(make(), *halves, *halves)
    assert text.startswith("For 'GradAccumulator', the loss '")
    assert "accumulator(gradients, gaccum_ms.CountNotIgnored()(*batch))" in text
    assert told_in_a_loop(make(), *halves, counts=CountNotIgnored()) == []


class Stateful(nn.Cell):
    """The base of networks that write something in their forward."""

    def __init__(self):
        super().__init__()
        self.dense = dense()
        self.center = ms.Parameter(Tensor(np.zeros(3, np.float32)), name="center", requires_grad=False)
        self.matched = ms.Parameter(Tensor(0, ms.int32), name="matched", requires_grad=False)

    def construct(self, x):
        out = self.dense(x)
        return ops.square(self.written(out) - self.center).mean()


class ByPrimitive(Stateful):
    def __init__(self):
        super().__init__()
        self.assign_add = ops.AssignAdd()

    def written(self, out):
        return ops.depend(out, self.assign_add(self.matched, Tensor(1, ms.int32)))


def move(center, value):
    return ops.assign(center, value)


class ByHelper(Stateful):
    def written(self, out):
        return ops.depend(out, move(self.center, out.mean(axis=0)))


class InPlace(Stateful):
    def written(self, out):
        self.center.copy_(ops.stop_gradient(out.mean(axis=0)))
        return out


class ByAddition(Stateful):
    def written(self, out):
        self.center += ops.stop_gradient(out.mean(axis=0))
        return out


class OnlyNamedAlike(Stateful):
    """No state: an attribute that is no Tensor, an activation that is changed in place, a Parameter that the Cell does
    not have."""

    def __init__(self):
        super().__init__()
        self.shape, self.is_monitored = None, False

    def written(self, out):
        self.shape = out.shape
        if self.is_monitored:
            out = ops.depend(out, ops.assign(self.monitored, out))
        return (out + ops.zeros_like(out)).add_(0.0)


class WithSummary(Stateful):
    def __init__(self):
        super().__init__()
        self.summary = ops.ScalarSummary()

    def written(self, out):
        self.summary("mean", out.mean())
        return out


@pytest.mark.parametrize(
    ("network", "where"),
    [
        (ByPrimitive, "self.matched of 'ByPrimitive'"),
        (ByHelper, "center of 'ByHelper'"),
        (InPlace, "self.center of 'InPlace'"),
        (ByAddition, "self.center of 'ByAddition'"),
        (OnlyNamedAlike, None),
    ],
)
def test_state_that_construct_writes_is_told(network, where, pynative):
    texts = told(make_step(network()), X)
    assert len(texts) == (where is not None), texts
    assert all(f"writes state in 'construct' ({where})" in text and "after_update" in text for text in texts)
    assert told(make_step(network(), micro_size=1), X) == []


def test_summaries_are_told_to_be_of_the_last_micro_batch():
    (text,) = told(make_step(WithSummary()), X)
    assert "records summaries (WithSummary), and of a batch only the last micro-batch's is kept" in text


class MeanSquare(nn.Cell):
    def construct(self, outputs):
        return (outputs**2).mean()


def twice(cell, inputs, outputs):
    return outputs * 2


def test_a_hook_of_a_weight_is_told_to_see_micro_batches(pynative):
    for micro_size, number in ((1, 0), (2, 1)):
        network = Regression()
        network.hidden.register_hook(lambda gradient: gradient.clip(-1, 1))
        texts = told(make_step(network, micro_size=micro_size), np.ones((4, 12), np.float32), np.ones(4, np.float32))
        assert len(texts) == number
        assert all("1 weight(s) have hooks (hidden), which get each micro-batch's part" in text for text in texts)


def test_forward_hooks_in_a_compiled_loss_of_the_batch_are_told(pynative):
    for jit, number in ((False, 0), (True, 1)):
        backbone = dense()
        backbone.register_forward_hook(twice)
        texts = told(make_step(WithBatchLossCell(backbone, MeanSquare()), micro_size=2, jit=jit), X)
        assert len(texts) == number
        text = "1 Cell(s) with forward hooks (backbone), which MindSpore runs too often where"
        assert all(text in each for each in texts)


def test_distributed_data_parallel_is_refused_with_the_mode_that_replaces_it(pynative):
    network = Regression()
    cell, optimizer = GradAccumulationCell(network, 2), nn.SGD(network.trainable_params(), 0.1)
    network.hidden.register_hook(lambda gradient: gradient)  # a hook of the user's own is none of theirs
    GradAccumulator(optimizer, 2)
    for weight in optimizer.parameters:
        weight.main_grad = None  # as MindSpore's, which runs on Ascend only, does
    for make in (
        lambda: TrainOneStepWithGradAccumulationCell(cell, optimizer),
        lambda: GradAccumulator(optimizer, 2),
    ):
        remedy = "in a DistributedDataParallel.*parallel_mode='data_parallel', gradients_mean=True"
        with pytest.raises(ValueError, match=f"'hidden' and 1 other.* {remedy}"):
            make()


def normed(**options):
    return nn.SequentialCell(dense(2), nn.BatchNorm1d(2, **options), nn.Dense(2, 1))


def in_part():
    network = normed()
    network[0].set_train()
    return network


def loop(network):
    """Two batches of a hand-written loop, beside a teacher in evaluation mode."""
    accumulator, teacher = GradAccumulator(nn.SGD(network.trainable_params(), 0.1), 2, jit=False), nn.Dropout(p=0.5)
    grad_fn = accumulator.value_and_grad(lambda x, y: ops.square(network(x) - teacher(y)).mean())
    return lambda x, y: accumulator(grad_fn(x, y)[1])


def bare_step(network):
    """A step whose mode nobody has set."""
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
    return TrainOneStepWithGradAccumulationCell(cell, nn.SGD(network.trainable_params(), 0.1))


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda: nn.SequentialCell(dense(1), nn.Dropout(p=0.5)), 1),
        (normed, 1),
        (lambda: normed(use_batch_statistics=False), 0),  # frozen by choice
        (in_part, 0),
    ],
    ids=["dropout", "batch norm", "frozen", "in part"],
)
def test_training_in_evaluation_mode_is_told_once(make, number, pynative):
    for train in (loop, bare_step):
        texts = told(train(make()), X, X[:, :1])
        assert len(texts) == number
        assert all("is trained in evaluation mode" in text and "call set_train()" in text for text in texts)
        texts = told(train(make().set_train()), X, X[:, :1])
        assert not any("evaluation mode" in text for text in texts)
