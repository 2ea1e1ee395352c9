"""audit names the one remedy that works, which it has tried: here each is applied, and the audit passes."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    CountClassWeights,
    CountMask,
    CountNotIgnored,
    EvenSplit,
    GradAccumulationCell,
    WithBatchLossCell,
    audit,
    convert_batchnorm_to_groupnorm,
)
from tests.support.reference import as_numpy

RANDOM = np.random.default_rng(0)
TRIED = "This was tried, and makes it equal: "


def constant(*shape):
    """Values that depend on the shape alone."""
    return Tensor(np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(np.float32))


def dense(inputs, outputs):
    return nn.Dense(inputs, outputs, weight_init=constant(outputs, inputs), bias_init="zeros")


def report_of(network, *batch, **options):
    cell = GradAccumulationCell(network, **(options if "micro_batch_size" in options else {"micro_size": 3, **options}))
    return audit(cell, nn.SGD(cell.trainable_params(), 0.1), *map(Tensor, batch))


def remedy_of(report) -> str:
    """The remedy that is named, alone."""
    assert len(report.problems) == 1, report
    assert TRIED in report.problems[0], report
    return report.problems[0].partition(TRIED)[2].removesuffix(".")


def options_of(remedy, network) -> dict:
    """The remedy's words as the cell's options. The names of the network's Cells are those of its attributes."""
    known = {one.__name__: one for one in (CountNotIgnored, CountClassWeights, CountMask, EvenSplit)}
    return eval(f"dict({remedy})", {**known, **network._cells, **vars(network)})


# -- what a loss is a mean over ----------------------------------------------------------------------------------------

X = RANDOM.normal(size=(12, 5)).astype(np.float32)
Y = np.array([0] * 8 + [1] * 3 + [2]).astype(np.int32)
IGNORED = np.where(np.arange(12) % 7 < 3, -100, Y).astype(np.int32)
CLASS_WEIGHTS = Tensor(np.array([1.0, 5.0, 20.0], np.float32))
TOKENS = RANDOM.integers(1, 11, size=(6, 7)).astype(np.int32)
LENGTHS = np.array([7, 2, 2, 7, 3, 2], np.int32)
LABELS = np.where(np.arange(7) < LENGTHS[:, None], TOKENS, -100).astype(np.int32)


class Shifted(nn.Cell):
    """A language model that shifts its labels itself."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)  # MindSpore's layer keeps an `init_tensor` , whose value means nothing
        self.embedding.embedding_table.set_data(constant(11, 4))
        self.head = dense(4, 11)

    def construct(self, tokens, labels):
        logits = self.head(self.embedding(tokens))[:, :-1]
        return ops.cross_entropy(logits.reshape((-1, 11)), labels[:, 1:].reshape((-1,)))


class Lengths(nn.Cell):
    """A mean over valid tokens, which an input of lengths tells."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, embedding_table=constant(11, 4))

    def construct(self, tokens, lengths):
        valid = ops.cast(ops.arange(7) < lengths.reshape((-1, 1)), ms.float32)
        return (ops.square(self.embedding(tokens)).sum(axis=-1) * valid).sum() / ops.cast(lengths, ms.float32).sum()


def cross_entropy(**options):
    return nn.WithLossCell(dense(5, 3), nn.CrossEntropyLoss(**options))


@pytest.mark.parametrize(
    ("make", "batch", "options", "remedy"),
    [
        (cross_entropy, (X, IGNORED), {}, "count=CountNotIgnored()"),
        (lambda: cross_entropy(weight=CLASS_WEIGHTS), (X, IGNORED), {}, "count=CountClassWeights(_loss_fn.weight)"),
        (Shifted, (TOKENS, LABELS), {"count": CountNotIgnored()}, "count=CountNotIgnored(shift=1)"),
        (Lengths, (TOKENS, LENGTHS), {}, "count=CountMask()"),
        (cross_entropy, (np.abs(X), Y), {"count": CountMask(0)}, "count=None"),
    ],
    ids=["ignored", "class weights", "shifted", "lengths", "needless"],
)
def test_names_the_count(make, batch, options, remedy, pynative):
    network = make()
    before = [as_numpy(one).tobytes() for one in network.get_parameters()]
    assert remedy_of(report_of(network, *batch, **options)) == remedy
    assert [as_numpy(one).tobytes() for one in network.get_parameters()] == before
    assert report_of(network, *batch, **{**options, **options_of(remedy, network)}).ok


class Focal(nn.Cell):
    """Focal loss over all anchors, divided by the number of positives: images without any have a loss too."""

    def __init__(self, returns_ratio=False):
        super().__init__()
        self.net = dense(5, 4)
        self.returns_ratio = returns_ratio

    def construct(self, x, positives):
        p = ops.sigmoid(self.net(x))
        p = p * positives + (1 - p) * (1 - positives)
        total = (-ops.square(1 - p) * ops.log(p)).sum()
        if self.returns_ratio:
            return total, positives.sum()
        return total / ops.maximum(positives.sum(), Tensor(1.0))


POSITIVES = np.zeros((12, 4), np.float32)
POSITIVES[[0, 0, 1, 10], [0, 2, 3, 1]] = 1  # the second micro-batch of three has none


def positives(x, positives):
    return positives.sum()


@pytest.mark.parametrize(("count", "said"), [(positives, "what 'count' counts"), (None, "count=CountMask()")])
def test_names_the_ratio_where_a_micro_batch_counts_nothing_but_has_a_loss(count, said, pynative):
    remedy = remedy_of(report_of(Focal(), X, POSITIVES, count=count))
    assert remedy.startswith('reduction="ratio", min_count=1 in place of a count')
    assert said in remedy
    assert report_of(Focal(returns_ratio=True), X, POSITIVES, reduction="ratio", min_count=1).ok


# -- losses of the whole batch -----------------------------------------------------------------------------------------

ONE_HOT = np.eye(3, dtype=np.float32)[Y]


class WithLabels(nn.Cell):
    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x, y):
        return self.net(x), y


def test_names_a_loss_of_the_whole_batch(pynative):
    net = nn.SequentialCell(dense(5, 3), nn.Sigmoid())
    remedy = remedy_of(report_of(nn.WithLossCell(net, nn.DiceLoss()), X, ONE_HOT))
    assert remedy == "WithBatchLossCell(backbone, loss)"
    assert report_of(WithBatchLossCell(WithLabels(net), nn.DiceLoss()), X, ONE_HOT).ok


# -- what is taken for samples -----------------------------------------------------------------------------------------


class Prototypes(nn.Cell):
    """The squared distance to the nearest prototype, of which there are as many as samples."""

    def __init__(self):
        super().__init__()
        self.net = dense(5, 5)

    def construct(self, x, prototypes):
        return ops.square(self.net(x).expand_dims(1) - prototypes).sum(axis=-1).min(axis=1).mean()


class TimeMajor(nn.Cell):
    """A mean over samples of a function of each sequence, with time in front."""

    def __init__(self):
        super().__init__()
        self.net = dense(5, 5)

    def construct(self, x, y):
        return ops.square(ops.tanh(self.net(x)).mean(axis=0) - y).mean()


def test_names_inputs_that_are_shared(pynative):
    prototypes = RANDOM.normal(size=(12, 5)).astype(np.float32)
    remedy = remedy_of(report_of(Prototypes(), X, prototypes))
    option, _, meaning = remedy.partition(". ")
    assert option == "split=EvenSplit(shared=(1,))"
    assert meaning == "Each micro-batch then sees the whole of input(s) 1: share only what has no entries of samples"
    assert report_of(Prototypes(), X, prototypes, **options_of(option, Prototypes())).ok


class OwnLoss(nn.Cell):
    """The user's own loss, of one number for each sample."""

    def __init__(self):
        super().__init__()
        self.net = dense(5, 1)

    def construct(self, x, y):
        return ops.square(self.net(x) - y).mean()


class Reshaped(nn.Cell):
    """A network whose outputs have another shape."""

    def __init__(self, shape):
        super().__init__()
        self.net, self.shape = dense(5, 1), shape

    def construct(self, x):
        return self.net(x).reshape(self.shape)


def with_loss(loss, shape=(-1, 1)):
    return lambda: nn.WithLossCell(Reshaped(shape), loss)


NUMBERS = X.sum(axis=1)
BROADCAST = {
    "a sum": (with_loss(nn.MSELoss("sum")), NUMBERS, (12, 1)),
    "(N, 1) beside (N,)": (with_loss(nn.MSELoss(), (-1,)), NUMBERS[:, None], (12,)),
    "own loss": (OwnLoss, NUMBERS, (12, 1)),
}


@pytest.mark.parametrize("kind", BROADCAST)
def test_names_an_input_that_is_broadcast(kind, pynative):
    """No option is named that makes the two sides equal: both would learn from wrong pairs."""
    make, labels, shape = BROADCAST[kind]
    options = {"reduction": "sum"} if kind == "a sum" else {}
    report = report_of(make(), X, labels, **options)
    assert len(report.problems) == 1, report
    assert f"input 1 of shape {labels.shape} is broadcast" in report.problems[0], report
    assert f"Give it the shape {shape}" in report.problems[0]
    assert TRIED not in report.problems[0] and "shared=(" not in report.problems[0]
    assert ("or, if its entries are not those of samples" in report.problems[0]) == (kind == "own loss")
    assert report_of(make(), X, labels.reshape(shape), **options).ok


SEQUENCES = RANDOM.normal(size=(6, 6, 5)).astype(np.float32)
TARGETS = RANDOM.normal(size=(6, 5)).astype(np.float32)


def test_names_the_axis_of_samples(pynative):
    assert remedy_of(report_of(TimeMajor(), SEQUENCES, TARGETS)) == "split=EvenSplit(axis=(1, 0))"
    assert report_of(TimeMajor(), SEQUENCES, TARGETS, split=EvenSplit(axis=(1, 0))).ok


class WithOutputs(nn.Cell):
    """Its second output depends on the other samples."""

    def __init__(self):
        super().__init__()
        self.net = dense(5, 3)

    def construct(self, x, y):
        out = self.net(x)
        return ops.cross_entropy(out, y), y, out - out.mean(axis=0)


def test_names_outputs_that_are_not_of_a_sample(pynative):
    (problem,) = report_of(WithOutputs(), X, Y, aux=True).problems
    assert "Output(s) 1 after the loss, counted from 0" in problem


# -- BatchNorm over one value ------------------------------------------------------------------------------------------


def test_names_a_variance_of_one_value(pynative):
    def network():
        return nn.WithLossCell(nn.SequentialCell(dense(5, 4), nn.BatchNorm1d(4), dense(4, 3)), nn.CrossEntropyLoss())

    x, y = X[::3], Y[::3]
    report = report_of(network(), x, y, micro_batch_size=1)
    assert len(report.problems) == 2
    assert "BatchNorm layer(s) couple" in report.problems[0] and "nn.GroupNorm" in report.problems[0]
    assert report.problems[1].startswith("1.moving_variance become(s) NaN for good")
    assert not any("NaN" in problem for problem in report_of(network(), x, y, micro_batch_size=2).problems)
    converted = network()
    convert_batchnorm_to_groupnorm(converted, 1)
    assert report_of(converted, x, y, micro_batch_size=1).ok


# -- state -------------------------------------------------------------------------------------------------------------


class Centred(nn.Cell):
    """Centres its outputs by a running mean, which its forward writes."""

    def __init__(self):
        super().__init__()
        self.net = dense(5, 3)
        self.center = ms.Parameter(Tensor(np.zeros(3, np.float32)), name="center", requires_grad=False)

    def construct(self, x, y):
        out = self.net(x)
        loss = ops.cross_entropy(out - self.center, y)
        mean = ops.depend(ops.stop_gradient(out), loss).mean(axis=0)
        return ops.depend(loss, ops.assign(self.center, 0.9 * self.center + 0.1 * mean))


def test_names_state(pynative):
    (problem,) = report_of(Centred(), X, Y).problems
    assert "writes state in 'construct' (" in problem
    assert "center" in problem
    assert "'after_update' of a gaccum_ms.Transform" in problem
