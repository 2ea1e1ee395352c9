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
    Transform,
    WithBatchLossCell,
    audit,
    convert_batchnorm_to_groupnorm,
)
from tests.support.reference import as_numpy, make_step

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


COUNTED = {
    "ignored": (cross_entropy, (X, IGNORED), {}, "count=CountNotIgnored()"),
    "class weights": (
        lambda: cross_entropy(weight=CLASS_WEIGHTS),
        (X, IGNORED),
        {},
        "count=CountClassWeights(_loss_fn.weight)",
    ),
    "shifted": (Shifted, (TOKENS, LABELS), {"count": CountNotIgnored()}, "count=CountNotIgnored(shift=1)"),
    "lengths": (Lengths, (TOKENS, LENGTHS), {}, "count=CountMask()"),
    "needless": (cross_entropy, (X, Y), {"count": CountMask(0)}, "count=None"),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_names_the_count(kind, pynative):
    make, batch, options, remedy = COUNTED[kind]
    if kind == "needless":
        batch = (np.abs(batch[0]), batch[1])
    network = make()
    before = [as_numpy(one).tobytes() for one in network.get_parameters()]
    report = report_of(network, *batch, **options)
    assert remedy_of(report) == remedy
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


class Centred(nn.Cell):
    """Returns an output that depends on the other samples."""

    def __init__(self, centred):
        super().__init__()
        self.net = dense(5, 3)
        self.centred = centred

    def construct(self, x, y):
        out = self.net(x)
        loss = ops.cross_entropy(out, y)
        return loss, y, loss, out - out.mean(axis=0) if self.centred else out


def test_names_outputs_that_are_not_of_a_sample(pynative):
    report = report_of(Centred(True), X, Y, aux=True)
    assert len(report.problems) == 1
    assert "Output(s) 2 after the loss, counted from 0" in report.problems[0]
    assert report_of(Centred(False), X, Y, aux=True).ok


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


class Teacher(nn.Cell):
    """A student learns from its own average, whose outputs are centred. The teacher's outputs leave the network."""

    def __init__(self):
        super().__init__()
        self.student = nn.Dense(5, 3, weight_init=constant(3, 5), has_bias=False)
        self.teacher = nn.Dense(5, 3, weight_init=-constant(3, 5), has_bias=False)
        self.teacher.weight.requires_grad = False
        self.center = ms.Parameter(Tensor(np.zeros(3, np.float32)), name="center", requires_grad=False)

    def construct(self, x):
        out = ops.stop_gradient(self.teacher(x))
        return -(ops.softmax(out - self.center) * ops.log_softmax(self.student(x))).sum(axis=1).mean(), out


class WritingTeacher(Teacher):
    """Writes both in its forward."""

    def construct(self, x):
        loss, out = super().construct(x)
        moved = ops.assign(self.center, 0.9 * self.center + 0.1 * ops.depend(out, loss).mean(axis=0))
        average = 0.9 * self.teacher.weight + 0.1 * self.student.weight
        return ops.depend(loss, (moved, ops.assign(self.teacher.weight, ops.depend(average, loss))))


class MoveTeacher(Transform):
    """Moves the teacher once per update."""

    def __init__(self, network):
        super().__init__()
        self.of = (network,)  # in a tuple, because its Parameters are not the transform's own

    def after_update(self, after):
        teacher, student = self.of[0].teacher.weight, self.of[0].student.weight
        return ops.depend(after, ops.assign(teacher, 0.9 * teacher + 0.1 * ops.depend(student, after)))


def test_names_state_and_the_recipe_makes_it_pass(pynative):
    report = report_of(WritingTeacher(), X)
    assert len(report.problems) == 1
    assert "writes state in 'construct' (" in report.problems[0]
    for name in ("center", "teacher.weight"):
        assert name in report.problems[0]
    assert "'after_update' of a gaccum_ms.Transform" in report.problems[0]
    network = Teacher()
    assert report_of(network, X, aux=True, transforms=(MoveTeacher(network),)).ok


class LossAlone(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)[0]


def test_the_recipe_for_state_is_exact(pynative):
    """A running centre and an average teacher, against a network that writes them with the whole batch. There the
    teacher moves before the update, from the student before it."""
    whole, network = Teacher(), Teacher()
    whole_step = nn.TrainOneStepCell(LossAlone(whole), nn.SGD(whole.trainable_params(), 0.5)).set_train()
    options = {"micro_size": 4, "aux": True, "transforms": (MoveTeacher(network),)}
    step = make_step(network, lambda weights: nn.SGD(weights, 0.5), **options)
    for _ in range(3):
        out = whole.teacher(Tensor(X))
        loss = whole_step(Tensor(X))
        ops.assign(whole.center, 0.9 * whole.center + 0.1 * out.mean(axis=0))
        ops.assign(whole.teacher.weight, 0.9 * whole.teacher.weight + 0.1 * whole.student.weight)
        found, outputs = step(Tensor(X))
        ops.assign(network.center, 0.9 * network.center + 0.1 * outputs.mean(axis=0))
        assert float(found) == pytest.approx(float(loss), rel=1e-6)
    for one, other in zip(network.get_parameters(), whole.get_parameters(), strict=True):
        np.testing.assert_allclose(as_numpy(one), as_numpy(other), atol=1e-6)
    assert np.abs(as_numpy(network.center)).max() > 0.01
